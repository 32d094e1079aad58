"""The Prefect runs of trainflow's flows: which processes they belong to, and what becomes of those whose process died.

A process that is killed reports nothing, so its runs stay Running in Prefect. Flow runs therefore carry a tag that
names its process (machine, pid, start time). The next command that uses the same Prefect finds the runs whose
process is certainly gone and sets them, and their task runs, to Crashed. It also ends task runs that are open although
their flow run has ended: task states travel as events, and a server that is killed may lose some. A run of another
machine is left alone here: only its heartbeat on the storage can tell (`trainflow.flows.runs.run_status`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from trainer_lib.locks.lease import Holder
from trainer_lib.secrets import mask
from trainflow.tasks.prefect.prefect_client import LIMIT_S, quick_client

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.filters import TaskRunFilter
    from prefect.client.schemas.objects import FlowRun

FLOW, SWEEP_FLOW = "pipeline", "sweep"
_TAG = "trainflow-process="
# A run that is retried has the tag of its last process until the new one has written its own.
_SETTLE_S = 2.0
# Seconds after which a run that was taken up again has its new tag, if its process lives.
_START_S = 300.0
# Seconds between two tries to tag a run, at most.
_PAUSE_S = 10.0
# Seconds that the end of a flow waits for the sweep.
_CLOSE_S = 10.0
_PAGE = 200
_OPEN = ["PENDING", "RUNNING", "CANCELLING"]
_OPEN_TASK = [*_OPEN, "SCHEDULED", "PAUSED"]
_ENDED = ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]
_log = logging.getLogger(__name__)

Left = Literal["unknown", "starting"]


@dataclass(frozen=True)
class DeadRun:
    """A flow run whose process has ended without a word, or before the server knew the end of all tasks.

    `seen` identifies the state in which it was seen; another one means that it continues.
    """

    flow_run_id: UUID
    name: str
    holder: Holder
    state: str
    seen: tuple[Any, ...]


def find_flow_run(name: str, started: datetime) -> UUID | None:
    """The Prefect run of this name that began nearest to a time: other storages may have runs of the same name."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

    with quick_client() as client:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
    began = {run.id: abs(run.start_time - started) for run in runs if run.start_time is not None}
    return min(began, key=lambda run_id: began[run_id], default=None)


def current_flow_run_id() -> UUID | None:
    """The id of the Prefect run that this code runs in; None outside of a flow."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    return None if context is None or context.flow_run is None else context.flow_run.id


def created_by_this_process() -> contextlib.AbstractContextManager[set[str]]:
    """Tag the flow run that is created inside the block as this process's, from its first moment on."""
    from prefect import tags

    return tags(_own_tag())


def _own_tag() -> str:
    holder = Holder.this_process()
    return _TAG + "|".join((holder.machine, str(holder.pid), holder.started, holder.since))


@dataclass(eq=False)
class OwnFlowRun:
    """The run of a flow, as its body sees it."""

    began: datetime | None = None  # when its first attempt began; None: this is the first
    name: str | None = None  # its name in Prefect, once `rename` has set it
    ended: threading.Event = field(default_factory=threading.Event)
    changed: threading.Event = field(default_factory=threading.Event)

    def rename(self, name: str | None) -> None:
        """Have the run called `name` in Prefect, soon; None leaves its name. Never waits."""
        self.name = name
        self.changed.set()

    def end(self) -> None:
        """Note that the body has ended."""
        self.ended.set()
        self.changed.set()


@contextlib.contextmanager
def own_flow_run() -> Iterator[OwnFlowRun]:
    """In the body of a flow: tag its run with this process, and sweep the runs of dead ones in the background.

    Nothing here fails the flow; a server that does not answer costs it three seconds at most.
    """
    from prefect.context import FlowRunContext, TagsContext

    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None:
        yield OwnFlowRun()
        return
    own = OwnFlowRun(run.start_time if run.run_count > 1 else None)
    tags = TagsContext.get().current_tags
    kept = {tag for tag in tags if not tag.startswith(_TAG)}
    # Else another process has created the run, or ran it before, whose tag is there until ours is.
    is_tagged = kept != tags
    ours = None if is_tagged else {_own_tag(), *(tag for tag in run.tags if not tag.startswith(_TAG))}
    introduce = threading.Thread(target=_introduce, args=(run.id, ours, own), name="trainflow-sweep", daemon=True)
    introduce.start()
    if not is_tagged:
        introduce.join(LIMIT_S)
    # Not for the tasks: Prefect would ask for the concurrency limits of all tags before every task.
    with TagsContext(current_tags=kept):
        try:
            yield own
        finally:
            own.end()
            introduce.join(_CLOSE_S)


def _introduce(flow_run_id: UUID, tags: set[str] | None, own: OwnFlowRun) -> None:
    """Replace a run's tags unless they are None, until it succeeds or the run has ended; sweep; name the run."""
    pause_s = 1.0
    while tags is not None:
        try:
            with quick_client() as client:
                client.update_flow_run(flow_run_id, tags=tags)
            break
        except Exception as error:
            # With the tag of its last process every sweep would take a run that is retried for dead.
            _log.debug("The flow run is not tagged yet: %s", error)
        if own.ended.wait(pause_s):
            return
        pause_s = min(2 * pause_s, _PAUSE_S)
    try:
        for run in sweep_dead_runs():
            _log.info("Prefect's run %s of %s is marked as ended.", run.name, run.holder)
    except Exception as error:  # the next command sweeps, too
        _log.debug("Dead runs were not looked for: %s", error)
    own.changed.wait()
    try:
        if own.name is not None:
            with quick_client() as client:
                client.update_flow_run(flow_run_id, name=own.name)
    except Exception as error:  # a missing name must not fail the run
        _log.debug("The flow run is not named: %s", error)


def sweep_dead_runs() -> list[DeadRun]:
    """Set every run to Crashed whose process is certainly gone, with its task runs; Cancelled if that was asked for.

    Takes two looks, two seconds apart, if there is anything to sweep. Raises httpx.HTTPError if no server answers.
    """
    with quick_client() as client:

        def look() -> list[DeadRun]:
            runs = ((run, _holder_of(run)) for run in _open_flow_runs(client) if not _is_starting_again(run))
            return [_dead(run, holder) for run, holder in runs if holder is not None and holder.is_gone()]

        return _end_after_two_looks(client, look)


def configured_api() -> str | None:
    """The address of the Prefect server that this process is set to use, without secrets; None: an embedded one."""
    from prefect.settings.models.api import APISettings

    # Read at every call: the address of an embedded server is in the current settings, too.
    url = APISettings().url
    return mask(url) if url else None


def end_runs_of(gone: Sequence[tuple[str, Holder]]) -> dict[str, Left]:
    """Set the flow runs of processes that have ended to Crashed, unless another process works on them by now.

    Takes two looks, two seconds apart, as the sweep does, at flow runs and the processes that their signs of life name.
    Returns the ids that stay open: "unknown" to this server, or "starting" again. Raises httpx.HTTPError.
    """
    left: dict[str, Left] = {}
    with quick_client() as client:

        def look() -> list[DeadRun]:
            judged = [(run_id, _judge(client, run_id, holder)) for run_id, holder in gone]
            left.update({run_id: found for run_id, found in judged if isinstance(found, str)})
            return [found for _, found in judged if isinstance(found, DeadRun)]

        _end_after_two_looks(client, look)
    return left


def _end_after_two_looks(client: SyncPrefectClient, look: Callable[[], list[DeadRun]]) -> list[DeadRun]:
    """End the runs that two looks find dead in the same state; a run that changes in between is left alone."""
    if not (found := look()):
        return []
    time.sleep(_SETTLE_S)
    still = look()
    dead = [run for run in found if run in still]
    for run in dead:
        _end_dead_run(client, run)
    return dead


def _judge(client: SyncPrefectClient, run_id: str, holder: Holder) -> DeadRun | Left | None:
    """The state of a flow run whose process has ended; None: it has ended, or belongs to another process."""
    from prefect.exceptions import ObjectNotFound

    try:
        run = client.read_flow_run(UUID(run_id))
    except (ObjectNotFound, ValueError):
        return "unknown"
    if run.state is None or run.state.type.value not in _OPEN:
        return None
    known = _holder_of(run)
    if known is not None and (known.machine, known.pid, known.started) != (holder.machine, holder.pid, holder.started):
        return None
    return "starting" if _is_starting_again(run) else _dead(run, holder)


def _end_dead_run(client: SyncPrefectClient, run: DeadRun) -> None:
    """Set a flow run and its open task runs to Crashed, or to Cancelled; tasks of one that has ended as it did."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.objects import State, StateType

    kind, why = run.state, f"The server did not learn how this task ended; its flow run is {run.state.lower()}."
    if not (has_ended := run.state in _ENDED):
        kind = "CANCELLED" if run.state == "CANCELLING" else "CRASHED"
        why = f"Its process ended without a word ({run.holder})."
    # The tasks first: a sweep that is killed in between finds the flow run again.
    of_run = FlowRunFilter.model_validate({"id": {"any_": [run.flow_run_id]}})
    for task_run in client.read_task_runs(flow_run_filter=of_run, task_run_filter=_unfinished_tasks(), limit=_PAGE):
        client.set_task_run_state(task_run.id, State(type=StateType(kind), message=why), force=True)
    if not has_ended:
        client.set_flow_run_state(run.flow_run_id, State(type=StateType(kind), message=why), force=True)


def _is_starting_again(run: FlowRun) -> bool:
    """Whether a process that takes the run up again may not have tagged it yet: its tag is the ended one's."""
    if run.state is None or run.state.is_pending():
        return run.run_count > 0
    age_s = (datetime.now(UTC) - run.state.timestamp).total_seconds()
    return run.run_count > 1 and 0 <= age_s < _START_S


def _dead(run: FlowRun, holder: Holder) -> DeadRun:
    state = "" if run.state is None else run.state.type.value
    return DeadRun(run.id, run.name, holder, state, (run.state_id, run.run_count))


def _open_flow_runs(client: SyncPrefectClient) -> Iterator[FlowRun]:
    """Flow runs that have not ended, and those that have, with a task that has not."""
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter

    flow = FlowFilter.model_validate({"name": {"any_": [FLOW, SWEEP_FLOW]}})
    for states, tasks in ((_OPEN, None), (_ENDED, _unfinished_tasks())):
        runs = FlowRunFilter.model_validate({"state": {"type": {"any_": states}}})
        read = partial(client.read_flow_runs, flow_filter=flow, flow_run_filter=runs, task_run_filter=tasks)
        offset = 0
        while page := read(limit=_PAGE, offset=offset):
            yield from page
            offset += len(page)


def _unfinished_tasks() -> TaskRunFilter:
    from prefect.client.schemas.filters import TaskRunFilter

    return TaskRunFilter.model_validate({"state": {"type": {"any_": _OPEN_TASK}}})


def _holder_of(run: FlowRun) -> Holder | None:
    """The process of a run by its tag; None: unknown."""
    for tag in run.tags:
        parts = tag.removeprefix(_TAG).split("|")
        if tag.startswith(_TAG) and len(parts) == 4 and parts[1].isdigit():
            return Holder("", parts[0], int(parts[1]), parts[2], parts[3], 0.0)
    return None
