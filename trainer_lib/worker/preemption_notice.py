"""A notice of preemption during training: every rank stops at one step, which is saved before the machine goes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from trainer_lib.errors import Preempted, PreemptedByNotice
from trainer_lib.preemption import NoticeWatch
from trainer_lib.requests import TrainRequest
from trainer_lib.worker.session import Work


@contextlib.contextmanager
def stopped_by_notice(work: Work[TrainRequest], trainer: Any) -> Iterator[None]:
    """Inside, a notice stops the training, as a signal does. One process of each machine looks for it.

    Raises:
        PreemptedByNotice: on rank 0, whose machine the notice is about; training is saved.
    """
    asked = work.request.preemption
    if asked is None or int(os.environ.get("LOCAL_RANK", "0")) != 0:
        yield
        return

    def deliver() -> bool:
        # None until training begins, and after it.
        stop = trainer._trainflow.stop
        if stop is not None:
            stop.request()
        return stop is not None

    watch = NoticeWatch(asked, deliver)
    watch.start()
    try:
        yield
    except Preempted as error:
        # Another machine that goes is one of several: the leading one starts the next attempt without it.
        if watch.notice is None or work.rank != 0:
            raise
        raise PreemptedByNotice(
            f"This machine is about to be taken away ({watch.notice}). {error.message}",
            field="train.preemption",
            step=error.step,
            remedy="The same command continues, here or on another machine that reaches the storage.",
        ) from error
    finally:
        watch.close()
