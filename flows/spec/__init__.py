"""The spec: its fields, its YAML, and the checks that need no engine."""

from trainflow.flows.spec.spec import PipelineSpec as PipelineSpec
