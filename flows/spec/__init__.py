"""The spec: its fields, its YAML, and the checks that need no engine."""

from flows.spec.spec import PipelineSpec as PipelineSpec
