"""What Prefect's UI shows of a finished run beside its states: a summary with links, tables, and the loss curve.

Written at the end in one thread with a time limit: a server that is gone or hangs costs the run a moment and fails
nothing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from flows.charts import LOSS
from flows.results import PipelineResult
from flows.run_summary import summarize
from tasks.prefect_client import quick_client

LIMIT_S = 3.0
_log = logging.getLogger(__name__)


class HasPictures(Protocol):
    """What has the curves as PNG by name; none where this command trained nothing."""

    pictures: dict[str, bytes]


@contextlib.contextmanager
def run_artifacts(result: PipelineResult, record: HasPictures) -> Iterator[None]:
    """After the block, give the Prefect run that this code runs in its artifacts.

    Args:
        record: what has the pictures at the end of the block.
    """
    try:
        yield
    finally:
        if (flow_run_id := _flow_run_id()) is not None and result.stages:
            thread = threading.Thread(
                target=_post, args=(flow_run_id, result, record.pictures), name="trainflow-artifacts", daemon=True
            )
            thread.start()
            thread.join(LIMIT_S)


def make_artifacts(result: PipelineResult, pictures: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The artifacts as Prefect's API takes them: key, type, data, description."""
    found = [
        {"key": "summary", "type": "markdown", "data": summarize(result), "description": "What ran, and where it is"}
    ]
    if rows := _metric_rows(result):
        found.append({"key": "metrics", "type": "table", "data": json.dumps(rows), "description": "Measured quality"})
    if result.gates:
        names = ("metric", "requirement", "value", "passed")
        rows = [{name: _plain(gate[name]) for name in names} for gate in result.gates]
        found.append({"key": "gates", "type": "table", "data": json.dumps(rows), "description": "evaluate.require"})
    if (image := pictures.get(LOSS)) is not None:
        data = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        found.append({"key": "loss", "type": "image", "data": data, "description": "Loss by optimizer step"})
    return found


def _post(flow_run_id: Any, result: PipelineResult, pictures: Mapping[str, bytes]) -> None:
    from prefect.client.schemas.actions import ArtifactCreate

    try:
        with quick_client(LIMIT_S) as client:
            for artifact in make_artifacts(result, pictures):
                client.create_artifact(ArtifactCreate(**artifact, flow_run_id=flow_run_id))
    except Exception as error:  # the server is away: the run is not
        _log.debug("Prefect's server did not take the artifacts: %s", error)


def _flow_run_id() -> Any:
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    return None if context is None or context.flow_run is None else context.flow_run.id


def _metric_rows(result: PipelineResult) -> list[dict[str, Any]]:
    rows = []
    for outcome in result.stages:
        for split, values in ((outcome.manifest or {}).get("metrics") or {}).items():
            if isinstance(values, Mapping):
                measured = values.items()
                rows += [{"split": split, "metric": name, "value": _plain(value)} for name, value in measured]
    return rows


def _plain(value: Any) -> Any:
    # Browsers read no NaN in JSON.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
