"""Stages that run again although their result is committed: it is too old, or the publication it made is gone.

Too old is what has reached the age of a spec's `refresh: {prepare: 1d}`.
A result is never replaced in its place, because another run may just be reading it. The key of the next one says which
result it follows:

    key                            the first result
    key + {"refresh": "2026-…"}    the result that follows the one committed at that time

So every process that finds a result too old comes to the same new key: one of them makes it, the others wait, and a
killed attempt continues. The older result stays. A stage that takes the result goes by its content, so what comes out
the same changes nothing behind it.

The way from the first result to the newest is as long as their number. `<storage>/refresh/<stage>/<key[:16]>.json`
shortens it: it names a result to begin with. Losing it costs only time.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import ConfigError, DamagedError, StorageError
from trainer_lib.hub.folder import open_hub
from trainer_lib.storage import Store
from trainer_lib.storage.commit import read_commit
from trainflow.tasks.configs import MaxAge, PublishConfig
from trainflow.tasks.keys.keys import REFRESH, StageKey
from trainflow.tasks.stage import progress as _progress

if TYPE_CHECKING:
    from trainflow.tasks.stage.context import StageContext
    from trainflow.tasks.stage.facts import PublishFacts
    from trainflow.tasks.stage.manifest import StageManifest

_FOLDER = "refresh"
_LIMIT = 4096


def current_key(key: StageKey, context: StageContext) -> StageKey:
    """The key of the stage's newest result, or of the next one if that is too old. Reads the storage, writes nothing.

    A run decides this once: a result that becomes too old during the run stays in use.
    """
    limit = context.refresh.get(key.stage)
    if limit is None:
        return key
    first = key.first
    return context.resolver.once((REFRESH, first.digest), lambda: _find_current(first, limit, context))


def note_refreshed(storage: str, key: StageKey) -> None:
    """Note a result that was just committed, so that the way to it is short."""
    if REFRESH not in key.fields:
        return
    store, name = _notes(storage, key)
    # The next look goes the whole way.
    with contextlib.suppress(StorageError):
        store.write_bytes(name, json.dumps({"key": key.first.digest, REFRESH: key.fields[REFRESH]}).encode())


def _find_current(first: StageKey, limit: MaxAge, context: StageContext) -> StageKey:
    now = context.resolver.as_of or datetime.now(UTC)
    key, why = _begin(first, context.storage), None
    while (committed := _time_of_commit(key, context.storage)) is not None:
        if now - committed <= limit.age:
            return key
        why = f"the result of {committed:%Y-%m-%d %H:%M} UTC is older than {limit}"
        key = first.following(committed.isoformat(timespec="microseconds"))
    return replace(key, because=why)


def _begin(first: StageKey, storage: str) -> StageKey:
    store, name = _notes(storage, first)
    try:
        record = parse_json(store.read_if_exists(name, limit=_LIMIT) or b"{}")
        if record.get("key") == first.digest and isinstance(record.get(REFRESH), str):
            return first.following(record[REFRESH])
    except (ValueError, AttributeError, DamagedError):
        pass  # half written: only the way is longer
    return first


def _time_of_commit(key: StageKey, storage: str) -> datetime | None:
    """When the result under a key was committed; None: there is none that could be used."""
    try:
        commit = read_commit(Store.open(storage).child("stages", key.stage, key.folder), kind="stage")
        if commit is None or commit.meta.get("key") != key.digest:
            return None
        created = datetime.fromisoformat(commit.created)
    except (DamagedError, ValueError):  # the stage's own look says what is wrong with it
        return None
    return created if created.tzinfo is not None else created.replace(tzinfo=UTC)


def _notes(storage: str, key: StageKey) -> tuple[Store, str]:
    return Store.open(storage).child(_FOLDER, key.stage), f"{key.first.folder}.json"


def publication_target(config: PublishConfig, context: StageContext) -> str:
    """The address that the pipeline publishes to: that of the spec, else a folder below the storage."""
    # The key has its own form of this, without the storage's path (`publish_key`).
    return config.to or Store.open(context.storage).child("hub", context.name).url


def find_publication_problem(
    config: PublishConfig, context: StageContext, manifest: StageManifest[PublishFacts]
) -> str | None:
    """The damage of an earlier publication; None if it is intact, or if its hub cannot be reached.

    A publication that was found intact is not read again by the same command.
    """
    facts, to = manifest.facts, publication_target(config, context)

    def look() -> str | None:
        hub = open_hub(to, revision=config.revision, private=config.private)
        try:
            is_there = hub.holds(facts.revision, facts.published_digest)
        except (StorageError, ConfigError) as error:  # the manifest is trusted
            message = f"{to} could not be asked whether the publication is still there: {error.message}"
            _progress.publish({"event": "warning", "stage": manifest.stage, "message": message})
            return None
        return None if is_there else f"{facts.published_url} is gone, or not as it was published"

    return context.resolver.inspect_once(("publication", to, facts.revision, facts.published_digest), look)
