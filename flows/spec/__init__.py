"""The spec: its fields, its YAML, and the checks that need no engine."""
