"""Unreferenced results of a storage, and their removal while commands run.

Runs go first: those that are not running, not among the newest of their pipeline, not tagged, registered or published.
Then go the stages' folders that no record names any more. In every folder a note is left first, under the folder's
lease; then the records are read once more. A run writes down the folder that a stage will look into before it looks,
and waits for a note that it finds there, so of a run that begins and a removal at least one sees the other: nothing is
touched, or the stage finds nothing and runs again. Two removals exclude each other by the same lease.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from trainer_lib.base.json_text import BrokenSealError
from trainer_lib.errors import DamagedError, InfrastructureError, StorageError, TrainflowError, first_line
from trainer_lib.locks.lease import Lease, acquire_lease, find_holder
from trainer_lib.locks.removal import REMOVING, announce_removal, list_readers, remove_run, withdraw_removal
from trainer_lib.secrets import MASK, mask
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT
from trainflow.flows.records.past_runs import RUN_FILE, RUNS, TAGS, PastRun, list_runs, raise_damage
from trainflow.flows.runs.run_status import read_signs
from trainflow.flows.stages import stage_names
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.keys.keys import FOLDER_CHARS
from trainflow.tasks.stage.facts import PublishFacts
from trainflow.tasks.stage.manifest import STAGES, look_up_in, read_key_fields
from trainflow.tasks.tracking.mlflow_run import default_tracking_uri, tracking_uri

# A run refers to the folders that its record names: those of its results, and those that it worked in. A publication
# that is still there refers to the results that it was made from. A registered version refers to the run that logged
# it, and to the folder that its source names.


PUBLISH = "push-to-hub"
_TAG = "trainflow."
_SQLITE = "sqlite:///"

Folder = tuple[str, str]
"""A stage's name, and the name of one folder of it."""


@dataclass(frozen=True)
class Referrer:
    """Something outside of the runs' records, `what` in words ("published as …"), that refers to results."""

    what: str
    folders: frozenset[Folder]
    mlflow_run_id: str = ""

    def is_of(self, run: PastRun) -> bool:
        """Whether it refers to a run: by its MLflow run, or by the model that it trained or published."""
        if self.mlflow_run_id and self.mlflow_run_id == run.mlflow_run_id:
            return True
        telling = {folder for folder in self.folders if folder[0] in ("train", PUBLISH)}
        return not telling.isdisjoint(folders_of(run))


def folders_of(run: PastRun) -> set[Folder]:
    """The stages' folders that a run's record names."""
    pairs = [*run.stages.items(), *run.worked_in.items()]
    return {(stage, str(key)[:FOLDER_CHARS]) for stage, key in pairs}


# -- publications -----------------------------------------------------------------------------------------------------


def find_publications(storage: str) -> list[Referrer]:
    """The publications of this storage's models that are still there, as far as that can be seen without a hub."""
    return [
        Referrer(f"published as {mask(manifest.facts.published_url)}", _published_folders(storage, manifest.key))
        for name in Store.open(storage).children(f"{STAGES}/{PUBLISH}")
        if (manifest := look_up_in(storage, PUBLISH, name)) is not None
        and isinstance(manifest.facts, PublishFacts)
        and manifest.facts.held is None
        and _is_there(manifest.facts)
    ]


def _published_folders(storage: str, key: str) -> frozenset[Folder]:
    inputs = (read_key_fields(storage, PUBLISH, key) or {}).get("stage_keys")
    keys = {**(inputs if isinstance(inputs, dict) else {}), PUBLISH: key}
    return frozenset((stage, str(of_stage)[:FOLDER_CHARS]) for stage, of_stage in keys.items())


def _is_there(facts: PublishFacts) -> bool:
    if urlsplit(facts.published_url).scheme in ("hf", "http", "https"):
        return True  # only its hub could say, and what is published must not depend on an answer
    try:
        return Store.open(facts.published_url).exists(COMMIT)
    except StorageError:
        return True


# -- MLflow's registry ------------------------------------------------------------------------------------------------


def find_versions(storage: str, runs: Iterable[PastRun], config: TrackingConfig) -> list[Referrer]:
    """The versions in the registries of these runs and the spec, and what they refer to. Raises InfrastructureError."""
    root = Store.open(storage)
    own = tracking_uri(config, root)  # with credentials, where the environment has them
    uris = {own}
    for uri in sorted({str(run.record.get("tracking_uri")) for run in runs if run.mlflow_run_id} - {mask(own)}):
        if (database := _database(uri)) is None or database.is_file():
            uris.add(uri)
        # A storage that was moved or copied has its database next to it.
        elif (database := _database(default_tracking_uri(root))) is None or not database.is_file():
            raise _unreachable(uri, "its database is not there")
    return [referrer for uri in sorted(uris) for referrer in _versions_of(uri, root)]


def _versions_of(uri: str, root: Store) -> Iterator[Referrer]:
    if MASK in uri:
        raise _unreachable(uri, "its credentials are not in the environment")
    if (database := _database(uri)) is not None and not _has_versions(database):
        return  # without importing mlflow, which takes seconds
    from trainer_lib.trackers.mlflow.mlflow_client import connect
    from trainer_lib.trackers.mlflow.mlflow_registry import list_model_versions

    try:
        versions = list_model_versions(connect(uri))
    except Exception as error:  # whatever mlflow raises
        raise _unreachable(uri, first_line(error)) from error
    for version in versions:
        keys = {name: str(version.tags.get(f"{_TAG}{name}") or "")[:FOLDER_CHARS] for name in stage_names()}
        folders = {*_folder_of(version.source, root), *((name, key) for name, key in keys.items() if key)}
        yield Referrer(f"registered as {version.name} version {version.version}", frozenset(folders), version.run_id)


def _folder_of(source: str, root: Store) -> set[Folder]:
    """The stage's folder that a version's source is in."""
    text = unquote(urlsplit(source).path) if source.startswith("file://") else source
    for place in {root.url, unquote(urlsplit(root.url).path) if root.is_local else root.url}:
        below = text.removeprefix(f"{place.rstrip('/')}/{STAGES}/")
        parts = below.split("/")
        if below != text and len(parts) > 1:
            return {(parts[0], parts[1])}
    return set()


def _database(uri: str) -> Path | None:
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def _has_versions(path: Path) -> bool:
    """Whether a database has any version; True where that cannot be seen without mlflow."""
    if not path.is_file():
        return False
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        return database.execute("SELECT 1 FROM model_versions LIMIT 1").fetchone() is not None
    return True


def _unreachable(uri: str, why: str) -> InfrastructureError:
    what = f"MLflow's registry cannot be asked which models are registered, so nothing is removed: {why}."
    remedy = "Try again when it answers; --skip-registry removes without asking it."
    return InfrastructureError(what, field="tracking", value=mask(uri), remedy=remedy)


def collect_folders(runs: Iterable[PastRun], others: Sequence[Referrer]) -> dict[Folder, str]:
    """Every folder that something refers to, and what does."""
    found = {folder: referrer.what for referrer in others for folder in referrer.folders}
    return found | {folder: f"run {run.id}" for run in runs for folder in folders_of(run)}


LIMITED = "limited"
"""Below a storage: the storage of its runs with `--limit`, which nothing refers to once they have ended."""
CHECKPOINTS = "checkpoints"
_AT_ONCE = 16
_log = logging.getLogger(__name__)

Kind = Literal["run", "stage", "publication"]


@dataclass(frozen=True)
class Item:
    """One folder that can go, and why."""

    kind: Kind  # "run" (a record), "stage" (a result, or what attempts left) or "publication" (of a limited run)
    store: Store
    bytes: int
    why: str


@dataclass
class Garbage:
    """Folders of a storage to remove and to keep."""

    items: list[Item] = field(default_factory=list)  # what can go, in the order in which it goes
    kept: dict[str, str] = field(default_factory=dict)  # id of a run -> why it stays
    # URL of a folder that nothing refers to -> the process that works in it or reads it.
    in_use: dict[str, str] = field(default_factory=dict)
    # URLs of symbolic links, which are neither followed nor removed, nor is what is behind them.
    links: list[str] = field(default_factory=list)
    obstacle: TrainflowError | None = None  # why nothing may be removed; None: nothing is in the way

    @property
    def bytes(self) -> int:
        """Bytes that its removal frees."""
        return sum(item.bytes for item in self.items)


def find_garbage(
    storage: str, *, keep: int | None = None, config: TrackingConfig | None = None, skip_registry: bool = False
) -> Garbage:
    """Find what nothing refers to. Nothing is changed. Raises StorageError.

    Args:
        keep: number of a pipeline's newest runs that stay, failed ones included, and the newest that
            finished; None: every run stays.
        config: the spec's `tracking` section; None: where a storage keeps its runs by default.
        skip_registry: do not ask MLflow's registry.
    """
    changed: list[DamagedError] = []
    garbage, runs = Garbage(), _list_runs(storage, changed.append)
    others = find_publications(storage)
    if not skip_registry:
        try:
            others += find_versions(storage, runs, config or TrackingConfig())
        except InfrastructureError as error:
            garbage.obstacle = error
    garbage.obstacle = garbage.obstacle or next(iter(changed), None)
    reasons = _why_runs_stay(storage, runs, keep, others)
    garbage.kept = {run.id: reasons[run.id] for run in runs if run.id in reasons}
    root = Store.open(storage)
    folder, known = root.child(RUNS), {run.id for run in runs}
    doomed = {run.id: f"beyond the newest {keep} of {run.name}" for run in runs if run.id not in reasons}
    lost = [name for name in folder.children() if name not in known and not _at_work(folder.child(name))]
    for name, why in (doomed | dict.fromkeys(lost, "it has no record that can be read")).items():
        garbage.items.append(Item("run", folder.child(name), _size(folder.child(name)), why))
    staying = collect_folders((run for run in runs if run.id in reasons), others)
    named = collect_folders(runs, others)
    for store, of_stage in _stage_folders(storage):
        if of_stage not in staying:
            why = f"only {named[of_stage]} refers to it" if of_stage in named else "no run refers to it"
            _add_stage(garbage, store, why)
    _add_limited(garbage, storage)
    removed = tuple(f"{item.store.url}/" for item in garbage.items)
    links = (f"{root.url.rstrip('/')}/{path}" for path in root.links())
    garbage.links = [url for url in links if not url.startswith(removed)]
    return garbage


def _list_runs(storage: str, on_change: Callable[[DamagedError], object]) -> list[PastRun]:
    """List the runs; call `on_change` for a record that was changed: which results it had referred to is not known."""

    def sort_out(damage: DamagedError) -> None:
        if isinstance(damage.__cause__, BrokenSealError):
            on_change(damage)

    return list_runs(storage, sort_out)


def _why_runs_stay(
    storage: str, runs: Sequence[PastRun], keep: int | None, others: Sequence[Referrer]
) -> dict[str, str]:
    """Id of a run -> why it stays; runs that may go are absent."""
    found: dict[str, str] = {}
    seen: dict[str, int] = {}
    finished: set[str] = set()
    folder = Store.open(storage).child(RUNS)
    for run in runs:  # the newest first
        seen[run.name] = seen.get(run.name, 0) + 1
        is_newest = keep is None or seen[run.name] <= keep
        is_last_good = run.is_finished and run.name not in finished
        finished |= {run.name} if run.is_finished else set()
        if process := _at_work(folder.child(run.id)):
            found[run.id] = f"at work: {process}"
        elif keep is None:
            found[run.id] = "recorded"
        elif is_newest:
            found[run.id] = f"among the newest {keep} of {run.name}"
        elif is_last_good:
            found[run.id] = f"the newest of {run.name} that finished"
        elif tags := folder.child(run.id).children(TAGS):
            found[run.id] = f"tagged {', '.join(tags)}"
        elif referrer := next((other for other in others if other.is_of(run)), None):
            found[run.id] = referrer.what
    return found


def _at_work(folder: Store) -> str | None:
    """The process working on a run; one of another machine counts until `trainflow status` has seen it dead."""
    return next((str(sign.holder) for sign in read_signs(folder) if sign.life() != "dead"), None)


def _stage_folders(storage: str) -> Iterator[tuple[Store, Folder]]:
    root = Store.open(storage).child(STAGES)
    for stage in root.children():
        for name in root.children(stage):
            yield root.child(stage, name), (stage, name)


def _add_stage(garbage: Garbage, store: Store, why: str) -> None:
    if not store.list():
        return  # some stores keep an empty folder
    if (user := find_holder(store) or _reader_of(store)) is not None:
        garbage.in_use[store.url] = str(user)
    else:
        garbage.items.append(Item("stage", store, _size(store), why))


def _reader_of(store: Store) -> str | None:
    """The process that reads a stage's folder, or a checkpoint of it."""
    places = [store, *(store.child(CHECKPOINTS, name) for name in store.children(CHECKPOINTS))]
    return next((str(reader) for place in places for reader in list_readers(place)), None)


def _add_limited(garbage: Garbage, storage: str) -> None:
    """Add the results of runs with `--limit` that have ended."""
    root = Store.open(storage)
    if LIMITED not in root.children():
        return  # absent, or a link
    scratch = root.child(LIMITED)
    runs = scratch.child(RUNS)
    why = "a run with --limit that has ended"
    if any(_at_work(runs.child(name)) for name in runs.children()):
        return
    for name in runs.children():
        garbage.items.append(Item("run", runs.child(name), _size(runs.child(name)), why))
    for store, _ in _stage_folders(scratch.url):
        _add_stage(garbage, store, why)
    for name in scratch.children("hub"):
        target = scratch.child("hub", name)
        if find_holder(target) is None:
            garbage.items.append(Item("publication", target, _size(target), why))


def _size(store: Store) -> int:
    return sum(info.size for info in store.list())


# -- removing ---------------------------------------------------------------------------------------------------------


def remove_garbage(
    storage: str,
    garbage: Garbage,
    *,
    config: TrackingConfig | None = None,
    skip_registry: bool = False,
    on_removed: Callable[[Item], object] = lambda _: None,
) -> list[Item]:
    """Remove what was found, unless something refers to it by now, and return what is gone. Raises StorageError.

    Raises InfrastructureError, and removes nothing more, if MLflow's registry cannot be asked.
    """
    if garbage.obstacle is not None:
        raise garbage.obstacle
    removed: list[Item] = []
    for item in _remove(garbage.items, lambda: _references_now(storage, config, skip_registry)):
        removed.append(item)
        on_removed(item)
    return removed


def _remove(items: Sequence[Item], references: Callable[[], dict[str, str]]) -> Iterator[Item]:
    """Remove items and yield those that are gone: runs, then the stages' folders, then publications."""

    def is_needed(folder: Store) -> bool:
        return _at_work(folder) is not None or bool(folder.children(TAGS))

    for item in items:
        if item.kind == "run" and remove_run(item.store, RUN_FILE, partial(is_needed, item.store)):
            yield item
    stages = [item for item in items if item.kind == "stage"]
    for start in range(0, len(stages), _AT_ONCE):
        yield from _remove_stages(stages[start : start + _AT_ONCE], references)
    for item in items:
        if item.kind == "publication" and (lease := acquire_lease(item.store, wait=lambda: True)) is not None:
            with lease:
                item.store.child("revisions").delete_tree()
            yield item


def _references_now(storage: str, config: TrackingConfig | None, skip_registry: bool) -> dict[str, str]:
    """URL of every stage's folder that something refers to now -> what does."""
    found: dict[str, str] = {}
    runs = _list_runs(storage, raise_damage)
    others = find_publications(storage)
    if not skip_registry:
        others += find_versions(storage, runs, config or TrackingConfig())
    root = Store.open(storage)
    places = {root: collect_folders(runs, others)}
    if LIMITED in root.children():
        places[root.child(LIMITED)] = collect_folders(_list_runs(root.child(LIMITED).url, raise_damage), [])
    for place, named in places.items():
        found |= {place.child(STAGES, *folder).url: what for folder, what in named.items()}
    return found


def _remove_stages(items: Iterable[Item], references: Callable[[], dict[str, str]]) -> Iterator[Item]:
    """Remove those folders that no process works in or reads, and that nothing refers to."""
    held: list[tuple[Item, Lease]] = []
    try:
        for item in items:
            # `wait` is asked only while another process holds the folder: then this one leaves it alone.
            lease = acquire_lease(item.store, wait=lambda: True)
            if lease is None:
                continue
            held.append((item, lease))
            announce_removal(item.store)
        named = references()
    except BaseException:
        for item, lease in held:
            _leave(item, lease)
        raise
    for item, lease in held:
        if item.store.url in named or _reader_of(item.store) is not None or lease.lost:
            _leave(item, lease)
            continue
        item.store.delete(COMMIT)
        for name in item.store.children():
            if name not in ("lease", REMOVING):
                item.store.delete_tree(name)
        withdraw_removal(item.store)
        lease.remove()
        yield item


def _leave(item: Item, lease: Lease) -> None:
    try:
        if not lease.lost:  # else the note is that of the process that has the folder now
            withdraw_removal(item.store)
    finally:
        lease.release()
