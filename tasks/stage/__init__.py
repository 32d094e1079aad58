"""The common part of stages: key, manifest, runs, retries and reports."""
