"""Prefect's client for calls that no work waits for: each ends within seconds, answered or not.

Prefect's own client repeats a request that fails for a minute, and waits a minute for each answer. That suits the start
of a flow; a running stage must not stand still because the server does. `RunLink` shows a stage's progress there, and
learns of a cancel, in a thread of its own: it tries again until the stage ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import ssl
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainflow.tasks.prefect.prefect_internals import without_retries

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

LIMIT_S = 3.0  # seconds that one request may take
# Each round is one or two requests to Prefect's server.
EVERY_S = 3.0
# Seconds before the first one: a stage that ends sooner, with nothing to show, asks the server nothing.
FIRST_S = 1.0
# Seconds that the end of a run waits for the last drawings; a server that hangs must not cost more.
_CLOSE_S = 1.0
# The threads of stages that have ended: what they still draw, nothing waits for before the run ends.
_ending: list[threading.Thread] = []
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def quick_client(limit_s: float = LIMIT_S) -> Iterator[SyncPrefectClient]:
    """Open a client whose requests end within `limit_s` seconds and are not repeated; failed ones raise HTTPError."""
    from prefect.client.orchestration import get_client

    chosen = {"timeout": limit_s, "verify": _tls_context()}
    with without_retries(), get_client(sync_client=True, httpx_settings=chosen) as client:
        yield client


def _tls_context() -> ssl.SSLContext:
    """Remember the client's SSL context: Prefect reads the certificates each time, which takes 30 ms."""
    from prefect.settings import get_current_settings

    settings = get_current_settings().api
    return _read_certificates(settings.ssl_cert_file, is_checked=not settings.tls_insecure_skip_verify)


@functools.lru_cache
def _read_certificates(path: str | None, *, is_checked: bool) -> ssl.SSLContext:
    import certifi

    context = ssl.create_default_context(cafile=path or certifi.where())
    if not is_checked:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def wait_for_drawings() -> None:
    """Wait until the stages that have ended are drawn in Prefect's UI; a second at most."""
    deadline = time.monotonic() + _CLOSE_S
    while _ending:
        _ending.pop().join(max(0.0, deadline - time.monotonic()))


class RunLink:
    """Reports one stage's progress to Prefect, and asks whether its flow run was cancelled there."""

    def __init__(self, stage: str, flow_run_id: Any, task_run_id: Any) -> None:
        self._stage = stage
        self._flow_run_id = flow_run_id
        self._task_run_id = task_run_id
        self._cancelled = threading.Event()
        self._done = threading.Event()
        self._wanted: tuple[float, str] | None = None
        self._drawn: tuple[float, str] | None = None
        self._artifact: Any = None
        self._thread = threading.Thread(target=self._run, name=f"trainflow-prefect-{stage}", daemon=True)
        self._thread.start()

    @classmethod
    def of_context(cls, stage: str) -> RunLink | None:
        """Make the link of the Prefect run that this code runs in; None outside of a run."""
        from prefect.context import FlowRunContext, TaskRunContext

        flow, task = FlowRunContext.get(), TaskRunContext.get()
        # A task that was submitted to another process has the flow run's id only in its own record.
        flow_run = flow.flow_run if flow is not None else None
        flow_run_id = flow_run.id if flow_run is not None else task.task_run.flow_run_id if task is not None else None
        return None if flow_run_id is None else cls(stage, flow_run_id, None if task is None else task.task_run.id)

    def is_cancelled(self) -> bool:
        """Whether the flow run was cancelled in Prefect's UI or through its API. Never waits."""
        return self._cancelled.is_set()

    def draw(self, share: float, text: str) -> None:
        """Show progress in Prefect's UI, soon: `share` percent, and a line of text. Never waits."""
        self._wanted = (min(share, 100.0), text)

    def close(self) -> None:
        """Draw the newest state and end, soon. Never waits: see `wait_for_drawings`."""
        _ending.append(self._thread)
        self._done.set()

    def _run(self) -> None:
        if self._done.wait(FIRST_S) and self._wanted is None:
            return
        while True:
            try:
                with quick_client() as client:
                    while True:
                        self._exchange(client)
                        if self._done.is_set() and self._wanted == self._drawn:
                            return  # the last drawing may have been asked for during this exchange
                        if self._done.wait(EVERY_S) and self._wanted == self._drawn:
                            return
            except Exception as error:  # the server is away: the work is not
                _log.debug("Prefect's server did not answer: %s", error)
                if self._done.wait(EVERY_S):
                    return

    def _exchange(self, client: SyncPrefectClient) -> None:
        if not self._cancelled.is_set() and not self._done.is_set():
            state = client.read_flow_run(self._flow_run_id).state
            if state is not None and (state.is_cancelling() or state.is_cancelled()):
                self._cancelled.set()
        if (wanted := self._wanted) is not None and wanted != self._drawn:
            self._draw(client, *wanted)
            self._drawn = wanted

    def _draw(self, client: SyncPrefectClient, share: float, text: str) -> None:
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        if self._artifact is not None:
            client.update_artifact(self._artifact, ArtifactUpdate(data=share, description=text))
            return
        artifact = ArtifactCreate(
            key=f"{self._stage}-progress",
            type="progress",
            data=share,
            description=text,
            flow_run_id=self._flow_run_id,
            task_run_id=self._task_run_id,
        )
        self._artifact = client.create_artifact(artifact).id
