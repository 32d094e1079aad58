"""Prefect tasks for stages: the outcome of a cached stage, and the policy of retries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from trainflow.tasks.stage.retry import DELAYS_S, JITTER, MAX_TRIES, should_retry

P = ParamSpec("P")
R = TypeVar("R")


class StageTask(Task[P, R]):
    """An ordinary Prefect task that may return ``Completed(name="Cached", data=manifest)``.

    Prefect takes a returned state for the outcome of the task, and its UI then shows "Cached"
    (https://docs.prefect.io/v3/concepts/states). But a plain call of such a task returns the state itself. Here it
    returns the manifest in the state, so a flow reads the same whether a stage ran or was cached. That is why this
    class exists: `submit`, `map` and `return_state` are Prefect's own.
    """

    if not TYPE_CHECKING:  # the types stay those of Prefect's overloads

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Run the task; its manifest, or its state when `return_state` is set."""
            result = super().__call__(*args, **kwargs)
            return result.result() if isinstance(result, State) and not kwargs.get("return_state") else result

        def with_options(self, **options: Any) -> StageTask[P, R]:
            """This stage with other Prefect options."""
            changed = super().with_options(**options)
            changed.__class__ = type(self)  # Prefect makes a plain Task of it
            return changed


def stage_task(name: str) -> Callable[[Callable[P, R]], StageTask[P, R]]:
    """Make a function a stage: retried as `trainflow.tasks.stage.retry` decides, and without Prefect's cache.

    The manifest on the storage says what is done; a second cache could contradict it.
    """

    def decorate(function: Callable[P, R]) -> StageTask[P, R]:
        return StageTask(
            function,
            name=name,
            cache_policy=NO_CACHE,
            persist_result=False,
            # An upper bound only: `should_retry` stops earlier.
            retries=MAX_TRIES,
            retry_delay_seconds=list(DELAYS_S),
            retry_jitter_factor=JITTER,
            retry_condition_fn=should_retry,
        )

    return decorate
