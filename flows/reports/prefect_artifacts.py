"""Artifacts of a finished run in Prefect's UI: a summary with links, and the loss curve.

Written at the end in one thread with a time limit: a server that is gone or hangs costs the run a moment and fails
nothing.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.hub.pictures import as_file
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.prefect_runs import current_flow_run_id
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.reports.report import LOSS, REPORT, draw_charts, render_report, render_summary
from trainflow.flows.reports.report_facts import collect_sections
from trainflow.tasks.prefect.prefect_client import quick_client
from trainflow.tasks.stage.progress import Event, describe, subscribe

if TYPE_CHECKING:
    from trainflow.flows.reports.run_record import RunRecord

# The report of a run that has not ended reloads itself, and is rewritten from the events of its stages; that of the end
# takes its place. Nothing here fails a run or holds it up.
EVERY_S = 10.0
_MOST_ENTRIES = 20_000


@contextlib.contextmanager
def live_report(plan: Plan, result: PipelineResult, folder: Store) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Keep the report in `folder` up to date inside the block, from the start of the first stage that runs.

    Yields what returns the log of the training so far.
    """
    writer = _Writer(plan, result, folder)
    with subscribe(writer.listen):
        try:
            yield lambda: list(writer.history)
        finally:
            writer.stop()


class _Writer:
    """The newest state of the run, and the thread that writes it down."""

    def __init__(self, plan: Plan, result: PipelineResult, folder: Store) -> None:
        self._plan, self._result, self._folder = plan, result, folder
        self._began, self._moment = time.monotonic(), time.time()
        self.history: list[dict[str, Any]] = []
        self._running: dict[str, dict[str, Any]] = {}
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self, event: Event) -> None:
        """Take note of an event."""
        stage, kind = str(event.get("stage") or ""), event.get("event")
        if kind == "stage":
            self._note_stage(stage, event)
        elif stage in self._running and kind in ("progress", "log", "resume", "wait"):
            known = self._running[stage]
            known |= {name: value for name, value in event.items() if value is not None}
            known["reason"] = describe(known) or event.get("message") or known.get("reason")
        if kind == "resume" and isinstance(event.get("history"), list):
            self.history = [dict(entry) for entry in event["history"]]
        if kind == "log" and stage == "train" and isinstance(event.get("logs"), dict):
            self.history.append({**event["logs"], "step": event.get("step")})
            # The curve is too dense to read: keep every other point.
            if len(self.history) > _MOST_ENTRIES:
                self.history = self.history[::2]

    def stop(self) -> None:
        """End the thread; nothing is written afterwards."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _note_stage(self, stage: str, event: Event) -> None:
        if event.get("status") == "started":
            self._running[stage] = {"since": time.monotonic(), "reason": event.get("reason")}
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep, name="trainflow-live-report", daemon=True)
                self._thread.start()
        elif event.get("status") != "waiting":
            self._running.pop(stage, None)

    def _keep(self) -> None:
        while not self._done.wait(EVERY_S):
            try:
                self._write()
            except Exception as unwritten:  # the next one may succeed; the work does not depend on it
                _log.debug("The report could not be written: %s", unwritten)

    def _write(self) -> None:
        now = time.monotonic()
        running = [
            {"stage": name, "status": "running", "reason": stage.get("reason") or "", "seconds": now - stage["since"]}
            for name, stage in list(self._running.items())
        ]
        plain = self._result.to_dict()
        known = {outcome["stage"] for outcome in plain["stages"]}
        stages = [*plain["stages"], *(stage for stage in running if stage["stage"] not in known)]
        url = f"{self._folder.url}/{REPORT}"
        state = {**plain, "stages": stages, "seconds": now - self._began, "started": self._moment, "report_url": url}
        page = render_report(
            state,
            draw_charts(self.history),
            sections=collect_sections(self._plan, self._result),
            spec=mask(self._plan.spec_text),
            refresh_s=max(1, round(EVERY_S)),
        )
        if not self._done.is_set():
            self._folder.replace(REPORT, page.encode())


LIMIT_S = 3.0
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def run_artifacts(result: PipelineResult, record: RunRecord) -> Iterator[None]:
    """After the block, give the Prefect run that this code runs in its artifacts, with the charts of `record`."""
    try:
        yield
    finally:
        if (flow_run_id := current_flow_run_id()) is not None and result.stages:
            thread = threading.Thread(
                target=_post, args=(flow_run_id, result, record.charts), name="trainflow-artifacts", daemon=True
            )
            thread.start()
            thread.join(LIMIT_S)


def make_artifacts(result: PipelineResult, charts: Mapping[str, str]) -> list[dict[str, Any]]:
    """The artifacts as Prefect's API takes them: key, type, data, description."""
    description = "What ran, with which results, and where it is"
    found = [{"key": "summary", "type": "markdown", "data": render_summary(result), "description": description}]
    if (drawing := charts.get(LOSS)) is not None:
        data = f"data:image/svg+xml;base64,{base64.b64encode(as_file(drawing)).decode()}"
        found.append({"key": "loss", "type": "image", "data": data, "description": "Loss by optimizer step"})
    return found


def _post(flow_run_id: Any, result: PipelineResult, charts: Mapping[str, str]) -> None:
    from prefect.client.schemas.actions import ArtifactCreate

    try:
        with quick_client(LIMIT_S) as client:
            for artifact in make_artifacts(result, charts):
                client.create_artifact(ArtifactCreate(**artifact, flow_run_id=flow_run_id))
    except Exception as error:  # the server is away: the run is not
        _log.debug("Prefect's server did not take the artifacts: %s", error)
