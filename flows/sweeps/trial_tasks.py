"""A sweep as a flow of Prefect, with trials as tasks.

The tasks run in threads of the command and watch: what trains is a slot, a process of this machine. A task runner that
carries tasks elsewhere (Dask, Ray) could not do better. Whether a trial is running is a lock that this machine's kernel
gives back, and a slot ends with its owner by a pipe; neither reaches another machine. Trainings do: `launch.engine`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import first_line
from trainflow.flows.records.prefect_runs import SWEEP_FLOW, created_by_this_process, own_flow_run
from trainflow.flows.server.api import prefect_api
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.flows.spec.sweep_settings import SweepSettings
from trainflow.flows.sweeps.sweep_result import reached_text
from trainflow.tasks.prefect.prefect_internals import console_handlers
from trainflow.tasks.stage.progress import masked_api_logs

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

_LAST_LINES_S = 5.0
"""Seconds in which the last lines of a slot that has ended are read."""

Events = queue.SimpleQueue[tuple["SlotProcess", dict[str, Any]]]


class SlotProcess:
    """One slot's process, in a separate session: Ctrl-C reaches us, and we stop it; `log` has what it prints."""

    def __init__(self, number: int, orders: Mapping[str, Any], folder: Path, events: Events) -> None:
        self.number = number
        self.log = folder / f"slot-{number + 1}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainflow.flows.sweeps.trial_slot"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{json.dumps(orders)}\n".encode())
            self.process.stdin.flush()
        self._reader = threading.Thread(target=self._read, args=(events,), name="trainflow-slot", daemon=True)
        self._reader.start()

    def _read(self, events: Events) -> None:
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        with self.process.stdout as output:
            for line in output:
                with contextlib.suppress(ValueError):
                    events.put((self, parse_json(line)))

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """Ask it to save the running trial, and to end."""
        if self.is_alive:
            self.process.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> None:
        """Wait for its end and its last events; end it at once after that time, or at another interruption."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        finally:
            if self.process.stdin is not None:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()
            self.process.wait()
            self._reader.join(_LAST_LINES_S)


class UnseenTrials:
    """Takes note of which slot is working on which trial, and shows it nowhere."""

    def begin(self, slot: SlotProcess, event: Mapping[str, Any]) -> None:
        """A slot has claimed a trial."""

    def end(self, slot: SlotProcess, event: Mapping[str, Any]) -> None:
        """The trial of a slot has ended."""

    def lose(self, slot: SlotProcess, why: str) -> None:
        """A slot has ended, and with it the trial that it was working on, if any."""


_log = logging.getLogger(__name__)


def run_as_flow(
    spec: PipelineSpec, settings: SweepSettings, work: Callable[[UnseenTrials], str], *, debug: bool
) -> None:
    """Do the `work` of a sweep, which tells its argument of trials and returns what failed, in a flow of Prefect."""
    import httpx

    with prefect_api():
        from prefect import Flow
        from prefect.task_runners import ThreadPoolTaskRunner

        body = _Body(work, TrialTasks(settings))
        runner: Any = ThreadPoolTaskRunner(max_workers=settings.parallel)
        flow = Flow(
            body.run,
            name=SWEEP_FLOW,
            flow_run_name=f"{spec.name}-{settings.name}",
            task_runner=runner,
            persist_result=False,
            result_serializer="json",
            validate_parameters=False,
        )
        with masked_api_logs(), _shown_on_console(debug), created_by_this_process():
            try:
                flow(settings.model_dump(mode="json", exclude_none=True), return_state=True)
            except httpx.HTTPError as error:
                if not body.is_over:
                    raise
                _log.warning("Prefect's server did not learn how the sweep ended: %s", first_line(error))
    if body.raised is not None:
        raise body.raised


class _Body:
    """The flow of a sweep.

    Attributes:
        raised: what ended it; Prefect would wrap it.
        is_over: whether it has ended.
    """

    def __init__(self, work: Callable[[UnseenTrials], str], trials: TrialTasks) -> None:
        self._work = work
        self._trials = trials
        self.raised: BaseException | None = None
        self.is_over = False

    def run(self, sweep: dict[str, Any]) -> State[Any]:
        """Do the work. Prefect shows the argument."""
        from prefect.states import Cancelled, Completed, Failed

        with own_flow_run():
            try:
                failed = self._work(self._trials)
            except KeyboardInterrupt as interrupt:
                self.raised = interrupt
                return Cancelled(message="Interrupted. The same command resumes it.")
            except Exception as error:
                self.raised = error
                return Failed(message=first_line(error))
            finally:
                self.is_over = True
                self._trials.stop()
        return Failed(message=failed) if failed else Completed()


@contextlib.contextmanager
def _shown_on_console(wanted: bool) -> Iterator[None]:
    """Inside the block, and unless it is wanted, Prefect's log goes to its API alone."""
    root = logging.getLogger()
    hidden = [] if wanted else console_handlers()
    for handler in hidden:
        root.removeHandler(handler)
    try:
        yield
    finally:
        for handler in hidden:
            root.addHandler(handler)


class TrialTasks(UnseenTrials):
    """Shows trials as tasks."""

    def __init__(self, settings: SweepSettings) -> None:
        self._settings = settings
        self._open: dict[int, Future[State[Any]]] = {}
        self._tasks: list[Any] = []

    @override
    def begin(self, slot: SlotProcess, event: Mapping[str, Any]) -> None:
        from prefect import Task
        from prefect.cache_policies import NO_CACHE
        from prefect.logging import get_run_logger

        end: Future[State[Any]] = Future()
        values = ", ".join(f"{name} = {value}" for name, value in event["values"].items())

        def follow() -> State[Any]:
            get_run_logger().info("%s", values)
            state = end.result()
            # The server ignores states older than the last one, and a trial may end before its task runs.
            state.timestamp = datetime.now(UTC)
            return state

        name = f"trial-{event['trial']}"
        task = Task(follow, name="trial", task_run_name=name, persist_result=False, cache_policy=NO_CACHE)
        self._open[slot.number] = end
        self._tasks.append(task.submit())

    @override
    def end(self, slot: SlotProcess, event: Mapping[str, Any]) -> None:
        from prefect.states import Completed, Failed

        reason = str(event.get("reason") or "")
        if event["state"] == "complete":
            self._finish(slot.number, Completed(message=reached_text(self._settings.objective, event["objective"])))
        elif event["state"] == "pruned":
            self._finish(slot.number, Completed(name="Pruned", message=reason))
        else:
            self._finish(slot.number, Failed(message=reason))

    @override
    def lose(self, slot: SlotProcess, why: str) -> None:
        from prefect.states import Crashed

        self._finish(slot.number, Crashed(message=why))

    def stop(self) -> None:
        """End the tasks of what is still running, and wait until Prefect knows the ends of all."""
        from prefect.states import Cancelled

        for number in list(self._open):
            self._finish(number, Cancelled(message="The sweep was stopped. The same command resumes it."))
        while self._tasks:
            self._tasks.pop().wait()

    def _finish(self, slot: int, state: State[Any]) -> None:
        if (end := self._open.pop(slot, None)) is not None:
            end.set_result(state)
