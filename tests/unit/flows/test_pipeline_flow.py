"""The pipeline as a Prefect flow: what its parameters look like to the server, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import Flow

from flows.pipeline import pipeline
from flows.spec.spec import load_spec

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits" / "pipeline.yaml"


def test_the_server_gets_the_parameters_that_prefect_would_send(tmp_path: Path) -> None:
    spec = load_spec(DIGITS, [f"storage={tmp_path}", "prepare.options.seed=1"])
    parameters: dict[str, Any] = {"spec": spec, "only": None, "force": ["train"], "debug": False}
    assert pipeline.serialize_parameters(parameters) == Flow.serialize_parameters(pipeline, parameters)
    strange = {**parameters, "start": object()}
    assert pipeline.serialize_parameters(strange) == Flow.serialize_parameters(pipeline, strange)
