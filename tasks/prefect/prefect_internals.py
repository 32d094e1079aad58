"""Every name of Prefect that its documentation does not promise, in one file.

`pyproject.toml` pins the versions of Prefect. Importing this module does not import Prefect.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")

_once: tuple[Any, Any] | None = None  # settings, and the same without retries
_copying = threading.Lock()


@contextlib.contextmanager
def settings_for_every_thread(updates: Mapping[Any, Any]) -> Iterator[None]:
    """Change Prefect's settings inside the block, also for threads whose context was copied before it.

    Prefect's own `temporary_settings` reaches only the current context; its background threads keep the old settings.
    """
    import prefect.context
    from prefect.settings import temporary_settings

    with temporary_settings(updates):
        context = prefect.context.get_settings_context()
        with prefect.context._temporary_global_settings_context(context):
            yield


@contextlib.contextmanager
def without_retries() -> Iterator[None]:
    """Inside the block, and in this context alone, Prefect's client sends requests once.

    Prefect's own `temporary_settings` copies all of its settings, a tenth of a second every time.
    """
    import prefect.context
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

    global _once
    context = prefect.context.get_settings_context()
    with _copying:  # stages that end together would all make copies
        known = _once
        if known is None or known[0] is not context.settings:
            known = context.settings, context.settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0})
            _once = known
    with prefect.context.SettingsContext(profile=context.profile, settings=known[1]):
        yield


def send_little(call: Callable[[], R]) -> R:
    """Make a call that sends tasks to other machines, to which their flow run goes along and how to reach the API.

    Prefect would send the flow with its parameters, the task around the call with its own, and every setting of this
    process, a password of the server's database included.
    """
    import prefect.context
    from prefect.settings import Profile

    class OnlyApi(prefect.context.SettingsContext):
        def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
            whole = super().serialize(include_secrets)
            return {"profile": whole["profile"], "settings": {"api": whole["settings"].get("api", {})}}

    running, settings = prefect.context.FlowRunContext.get(), prefect.context.get_settings_context().settings

    def inside() -> R:
        with contextlib.ExitStack() as stack:
            stack.enter_context(OnlyApi(profile=Profile(name="sent", settings={}), settings=settings))
            if running is not None and running.flow_run is not None:
                flow = prefect.Flow(_sent_in_place, name="pipeline", persist_result=False)
                flow_run = running.flow_run.model_copy(update={"parameters": {}})
                stack.enter_context(running.model_copy(update={"flow": flow, "flow_run": flow_run, "parameters": {}}))
            return call()

    return contextvars.Context().run(inside)


def _sent_in_place() -> None:
    """A stand-in for the flow on other machines, where nothing calls it."""


@contextlib.contextmanager
def patient_events(attempts: int) -> Iterator[None]:
    """Inside the block events wait for a server that is away, about a second per attempt, instead of ten.

    Task states travel as events, so an event that is given up is a task that the server never sees.
    """
    from prefect._internal.concurrency import logger
    from prefect.events.clients import PrefectEventsClient
    from prefect.events.worker import EventsWorker, emit_events_to_cloud

    logger.disabled = True  # of an event that is given up it shows every value
    if emit_events_to_cloud():
        yield
        return
    # A send succeeds as soon as the kernel has the event: only an answer shows that the server has it.
    EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=attempts, checkpoint_every=1)
    try:
        yield
    finally:
        EventsWorker.set_client_override(None)


def send_queued(timeout_s: float) -> None:
    """Send the events and log records that Prefect still holds in memory; drop those that it cannot send in time.

    Task states travel as events, so an event that is not sent is a task that the server never sees. Both queues have
    `timeout_s`.
    """
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    # Prefect logs at WARNING that it is draining the queue.
    logging.getLogger(EventsWorker.__name__).setLevel(logging.ERROR)
    # In a separate thread: in a running event loop, as of a notebook, both would return a coroutine and not wait.
    with ThreadPoolExecutor(1, "trainflow-send") as thread:
        for kind in (EventsWorker, APILogWorker):
            shared: Any = kind
            at_work = [(worker._loop, worker._task) for worker in list(shared._instances.values())]
            late: Any = thread.submit(shared.drain_all, timeout=timeout_s).result()[1]
            # Prefect would wait for a server that is away at the end of the process: a minute for an event.
            for loop, task in at_work if late else ():
                loop.call_soon_threadsafe(task.cancel)


def api_log_handlers() -> list[logging.Handler]:
    """Find the handlers that send log records to Prefect's API, as `set_up_logging` has installed them."""
    from prefect.logging.handlers import APILogHandler

    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    found = (handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers)
    return list({handler for handler in found if isinstance(handler, APILogHandler)})


def console_handlers() -> list[logging.Handler]:
    """Find the handlers with which Prefect shows all log records on the console."""
    from prefect.logging.handlers import PrefectConsoleHandler

    return [handler for handler in logging.getLogger().handlers if isinstance(handler, PrefectConsoleHandler)]


def set_up_logging() -> None:
    """Install Prefect's log handlers, if no flow has done so in this process yet."""
    from prefect.logging import configuration

    if not configuration.PROCESS_LOGGING_CONFIG:
        configuration.setup_logging()
