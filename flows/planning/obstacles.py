"""Obstacles of a plan, found before it runs: splits, room, the hub, MLflow's server.

What is asked over a network gets a few seconds to answer.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trainer_lib.base.durations import describe_bytes
from trainer_lib.errors import ConfigError, TrainflowError
from trainer_lib.hub.transport import SCHEME, parse_target
from trainer_lib.storage import Store
from trainer_lib.storage.urls import checked_address
from trainflow.flows.spec.checks import check_splits
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.tracking.mlflow_run import tracking_uri

if TYPE_CHECKING:
    from trainflow.flows.planning.forecast import Forecast
    from trainflow.flows.planning.plan import Plan

ANSWER_S = 5.0
"""Seconds that a server has to answer."""


@dataclass(frozen=True)
class Obstacle:
    """Something that will not work.

    Attributes:
        field: the setting that it is about.
        value: its value; None: it has none to show.
        what: the sentence.
        remedy: what to do.
        is_fatal: whether the run would fail; otherwise it goes on without.
    """

    field: str | None
    value: str | None
    what: str
    remedy: str | None
    is_fatal: bool = True

    @classmethod
    def of(cls, error: TrainflowError, *, is_fatal: bool = True) -> Obstacle:
        """Convert an error."""
        return cls(
            error.field, None if error.value is None else str(error.value), error.message, error.remedy, is_fatal
        )


def find_obstacles(plan: Plan, found: Forecast) -> list[Obstacle]:
    """Look for everything that will not work; asks servers, and writes a tiny file where the run would write.

    The file is removed at once.
    """
    failed = [] if found.error is None else [Obstacle.of(found.error)]
    places = [*_storage(plan), *_room(plan, found), *_publication(plan), *_repositories(plan)]
    return [*_splits(plan), *failed, *places, *_tracking(plan)]


def _splits(plan: Plan) -> Iterator[Obstacle]:
    reason = plan.reasons["prepare-data"]
    if reason.manifest is None or not isinstance(reason.manifest.facts, PrepareFacts):
        return
    try:
        check_splits(plan.spec, reason.manifest.facts.splits)
    except ConfigError as error:
        yield Obstacle.of(error)


def _storage(plan: Plan) -> Iterator[Obstacle]:
    try:
        Store.open(plan.spec.storage).ensure_writable()
    except TrainflowError as error:
        yield Obstacle.of(error)


def _room(plan: Plan, found: Forecast) -> Iterator[Obstacle]:
    room = found.room
    if room is None or room.needed_bytes is None or room.free_bytes is None or plan.reasons["train"].hit:
        return
    if room.needed_bytes > room.free_bytes:
        yield Obstacle(
            "storage",
            plan.spec.storage,
            f"The training needs {describe_bytes(room.needed_bytes)} there ({room.kept} checkpoints of "
            f"{describe_bytes(room.checkpoint_bytes or 0)}, and the model), and {describe_bytes(room.free_bytes)} are "
            "free.",
            "Set train.args.save_total_limit, free space, or choose another storage.",
        )


def _publication(plan: Plan) -> Iterator[Obstacle]:
    """The place to publish to: may this user write there?"""
    publish = plan.spec.publish
    # Unset, it lies below the storage, which is asked already.
    if not publish.enabled or not publish.to or plan.reasons["push-to-hub"].hit:
        return
    if publish.to.startswith(SCHEME):
        yield from _ask_hub(publish.to, "publish.to", writes=True, revision=publish.revision)
        return
    try:
        _nearest_folder(publish.to).ensure_writable(field="publish.to")
    except TrainflowError as error:
        yield replace(Obstacle.of(error), field="publish.to", value=publish.to)


def _nearest_folder(target: str) -> Store:
    """A folder, or where it is not there yet the one in which it would be made: a plan leaves no empty folder."""
    store = Store.open(target, field="publish.to")
    if not store.is_local:
        return store
    folder = store.local_path()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    # Where a file stands in the way, the target itself has the words for it.
    return Store.open(folder) if folder.is_dir() else store


def _repositories(plan: Plan) -> Iterator[Obstacle]:
    """The repositories on a hub that settings name: is there an answer, and may this user read?"""
    spec = plan.spec
    settings = {
        "train.model": spec.train.model,
        "train.options": spec.train.options,
        "prepare.options": spec.prepare.options,
    }
    for section, values in settings.items():
        for name, value in values.items():
            if isinstance(value, str) and value.startswith(SCHEME):
                yield from _ask_hub(value, f"{section}.{name}", writes=False)


def _ask_hub(address: str, field: str, *, writes: bool, revision: str | None = None) -> Iterator[Obstacle]:
    from trainer_lib.hub.huggingface import check_access

    try:
        target = parse_target(address, revision=revision, field=field)
        if target.repo is not None:
            check_access(target.repo, field=field, writes=writes, timeout_s=ANSWER_S)
    except TrainflowError as error:
        yield Obstacle.of(error)


def _tracking(plan: Plan) -> Iterator[Obstacle]:
    if not plan.spec.tracking.enabled:
        return
    uri = tracking_uri(plan.spec.tracking, Store.open(plan.spec.storage))
    if not uri.startswith(("http://", "https://")):
        return
    where = "tracking.uri" if plan.spec.tracking.uri else "MLFLOW_TRACKING_URI"
    address = urlsplit(uri)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        checked_address(uri, field=where, unset="a database next to the storage")
        socket.create_connection((address.hostname or "", port), timeout=ANSWER_S).close()
    except ConfigError as error:
        yield Obstacle.of(error)
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno) if error.errno else str(error) or "no answer"
        yield Obstacle(
            where,
            uri,
            f"MLflow's server does not answer ({reason}). The run works without it, and keeps what it logs.",
            "Start the server; trainflow sync delivers what waits.",
            is_fatal=False,
        )
