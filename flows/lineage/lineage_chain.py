"""From any link of a lineage to the whole chain.

An address is one of these::

    a publication             <storage>/hub/<name>, a revision below it, a copy of one anywhere, hf://organisation/name
    a run                     <storage>/runs/<run>; its id, name or tag, or the id of its MLflow run, with a storage
    a stage, a checkpoint     <storage>/stages/<stage>/<key>, …/checkpoints/checkpoint-<n>
    a registered model        models:/name@alias, models:/name/3

Only these addresses and the storage that is named are read: a lineage holds none that could be followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer_lib.errors import ConfigError, DamagedError, StorageError
from trainer_lib.hub.folder import REVISIONS, FolderHub
from trainer_lib.hub.huggingface import RECORD, download_snapshot
from trainer_lib.hub.transport import SCHEME, parse_target
from trainer_lib.model_folder.lineage import FILE, Lineage, StageLink, read_lineage_file
from trainer_lib.model_folder.locate import find_model, open_link
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, Commit, read_commit
from trainflow.flows.records.past_runs import RUN_FILE, PastRun, find_run, list_runs, read_run
from trainflow.flows.records.run_lineage import compose_lineage
from trainflow.tasks.stage.facts import PublishFacts
from trainflow.tasks.stage.manifest import STAGES, StageManifest, stage_folder

FIELD = "X"
_MODELS = "models:/"
_HUB = "hub"
_RUNS = "runs"
_PUSH = "push-to-hub"


@dataclass(frozen=True)
class Chain:
    """The links that an address leads to.

    Attributes:
        address: as it was given.
        kind: publication, run, stage, checkpoint or model.
        lineage: what is known of all links, the newest last.
        storage: where the stages and runs lie; None: not known from here.
        publication: the published folder; None: there is none, or it cannot be reached from here.
        published: the lineage in it; None: there is none, or it cannot be read.
        run: the run on the storage.
        recorded: the lineage that the run recorded when it ended; None: `lineage` was made from its stages.
        notes: sentences about links that are not known.
        damage: what is wrong with lineage files themselves, as (link, sentence).
    """

    address: str
    kind: str
    lineage: Lineage
    storage: Store | None = None
    publication: Store | None = None
    published: Lineage | None = None
    run: PastRun | None = None
    recorded: Lineage | None = None
    notes: tuple[str, ...] = ()
    damage: tuple[tuple[str, str], ...] = ()

    @property
    def run_folder(self) -> Store | None:
        """The run's folder on the storage."""
        if self.storage is None or self.run is None:
            return None
        return self.storage.child(_RUNS, self.run.id)

    def stage_folder(self, link: StageLink) -> Store | None:
        """The folder of a stage's result; None where no storage is known."""
        return None if self.storage is None else stage_folder(self.storage, link.stage, link.key)


@dataclass
class _Found:
    """What the address itself is."""

    kind: str
    storage: Store | None = None
    publication: Store | None = None
    run: PastRun | None = None
    key: tuple[str, str] | None = None
    notes: list[str] = field(default_factory=list)
    damage: list[tuple[str, str]] = field(default_factory=list)
    altered: DamagedError | None = None

    def take_altered(self, error: DamagedError) -> bool:
        """Take the run's record although it was altered."""
        self.altered = error
        self.damage.append(("run", f"{RUN_FILE}: {error.message.removesuffix('.')}"))
        return True


def find_chain(address: str, *, storage: str | None = None, home: str | None = None, lenient: bool = False) -> Chain:
    """The chain that an address is a link of.

    Args:
        storage: the storage of its run, where the address does not lie below it.
        home: the storage in which an id or a name is looked for; `storage` comes before it.
        lenient: a damaged lineage file becomes `Chain.damage`, for `trainflow verify`; a file that trainflow did not
            write is refused all the same.

    Raises:
        ConfigError: the address leads to no lineage. StorageError: it cannot be read.
        DamagedError: a lineage file was altered.
    """
    found = _identify(address, storage, home)
    if found.altered is not None and not lenient:
        raise found.altered
    if storage is not None:
        found.storage = Store.open(storage, field="--storage")
    published = None if found.publication is None else _read(found.publication, found, "publication", lenient)
    if found.publication is not None and published is None and not found.damage:
        raise ConfigError(
            f"The folder has no {FILE}: an older trainflow published it, or another program.",
            field=FIELD,
            value=address,
            remedy="Run its pipeline again, which publishes it with its lineage.",
        )
    if found.run is None and found.storage is not None:
        found.run = _find_run_of(found.storage, found.key, published)
    recorded = None
    if found.run is not None and found.storage is not None:
        folder = found.storage.child(_RUNS, found.run.id)
        recorded = _read(folder, found, "run", lenient)
        if found.publication is None:
            found.publication = _published_folder(found.storage, found.run, found.notes)
            published = None if found.publication is None else _read(found.publication, found, "publication", lenient)
    return Chain(
        address=address,
        kind=found.kind,
        lineage=_merge(found, published, recorded),
        storage=found.storage,
        publication=found.publication,
        published=published,
        run=found.run,
        recorded=recorded,
        notes=tuple(found.notes),
        damage=tuple(found.damage),
    )


# -- what the address is ----------------------------------------------------------------------------------------------


def _identify(address: str, storage: str | None, home: str | None) -> _Found:
    if address.startswith(SCHEME):
        target = parse_target(address, field=FIELD)
        folder = download_snapshot(target.repo or address, revision=target.revision)
        return _Found("publication", publication=Store.open(folder))
    if address.startswith(_MODELS):
        return replace(_of_folder(Store.open(_weights_of(address)), address), kind="model")
    if "/" in address or Path(address).exists():
        return _of_folder(open_link(address, field=FIELD), address)
    place = storage or home
    if place is None:
        raise ConfigError(
            "This is neither a folder nor a URL, and no storage is known in which it could be a run.",
            field=FIELD,
            value=address,
            remedy="Name the storage of the run (--storage URL), or a run's, stage's or published folder.",
        )
    return _Found("run", Store.open(place), run=find_run(place, address, field=FIELD, needs="train"))


def _weights_of(address: str) -> str:
    """Where the weights of a model in MLflow lie: the train stage, or a checkpoint of it."""
    found = find_model(address)
    if found.checkpoint is not None:
        return found.checkpoints.child(found.checkpoint).url
    return found.weights.url.rstrip("/").rpartition("/")[0]


def _of_folder(store: Store, address: str) -> _Found:
    if store.exists(RUN_FILE):
        [run, storage] = [store.url.rstrip("/").rpartition("/")[2], _above(store, 2)]
        found = _Found("run", storage)
        found.run = read_run(storage.url, run, found.take_altered) or find_run(storage.url, run, field=FIELD)
        return found
    commit, damage = _read_commit(store)
    if (commit is None and damage is None and store.exists(FILE)) or store.exists(RECORD):
        return _Found("publication", _storage_above(store), store)
    parts = store.url.rstrip("/").split("/")
    if damage is not None or (commit is not None and commit.kind == "published"):
        # A damaged commit file does not say of what it is; the folder's place does.
        if parts[-3:-2] == [STAGES] or parts[-2:-1] == ["checkpoints"]:
            return _of_stage(store if parts[-3:-2] == [STAGES] else _above(store, 2), store, commit, damage)
        return _Found("publication", _storage_above(store), store)
    if commit is not None and commit.kind == "checkpoint" and parts[-2:-1] == ["checkpoints"]:
        return _of_stage(_above(store, 2), store, commit, damage)
    if commit is not None and commit.kind == "stage":
        return _of_stage(store, store, commit, damage)
    name = FolderHub(store.url, field=FIELD).newest_name()
    if name is not None:
        newest = store.child(REVISIONS, name)
        return _Found("publication", _storage_above(newest), newest)
    raise ConfigError(
        "There is no lineage: this is neither a publication, nor a run, a stage or a checkpoint.",
        field=FIELD,
        value=address,
        remedy="Give <storage>/runs/<run>, <storage>/stages/<stage>/<key>, a published folder, hf://organisation/name, "
        "models:/name@alias, or the id of a run with --storage URL.",
    )


def _of_stage(stage: Store, store: Store, commit: Commit | None, damage: str | None) -> _Found:
    kind = "stage" if stage is store else "checkpoint"
    of_stage = commit if kind == "stage" else _read_commit(stage)[0]
    meta: dict[str, Any] = {} if of_stage is None else of_stage.meta
    parts = stage.url.rstrip("/").split("/")
    # Without a commit file the names of the folders say which stage and key these are.
    key = (str(meta.get("stage", parts[-2])), str(meta.get("key", parts[-1])))
    return _Found(kind, _above(stage, 3), key=key)


def _read_commit(store: Store) -> tuple[Commit | None, str | None]:
    try:
        return read_commit(store), None
    except DamagedError as error:
        return None, error.message


def _storage_above(publication: Store) -> Store | None:
    """The storage of a publication that lies in `<storage>/hub/<name>/revisions/<revision>`; None elsewhere."""
    parts = publication.url.rstrip("/").split("/")
    if len(parts) < 5 or parts[-2] != REVISIONS or parts[-4] != _HUB:
        return None
    storage = _above(publication, 4)
    return storage if storage.children(STAGES) else None


def _above(store: Store, levels: int) -> Store:
    return Store.open(store.url.rstrip("/").rsplit("/", levels)[0] or "/")


# -- its run, and its publication -------------------------------------------------------------------------------------


def _find_run_of(storage: Store, key: tuple[str, str] | None, published: Lineage | None) -> PastRun | None:
    """The newest run that has a stage's result, or all of those that a publication names."""
    if published is not None:
        wanted = {link.stage: link.key for link in published.stages}
    elif key is not None:
        wanted = {key[0]: key[1]}
    else:
        return None

    def has(run: PastRun) -> bool:
        return all(run.stages.get(stage, "").startswith(key) and bool(key) for stage, key in wanted.items())

    return next((run for run in list_runs(storage.url) if wanted and has(run)), None)


def _published_folder(storage: Store, run: PastRun, notes: list[str]) -> Store | None:
    """Where a run published to, below its storage; what lies elsewhere is not followed."""
    key = run.stages.get(_PUSH)
    if key is None:
        return None
    folder = stage_folder(storage, _PUSH, key)
    try:
        commit = read_commit(folder, kind="stage")
        manifest = None if commit is None else StageManifest.from_commit(folder.url, commit)
    except DamagedError:
        return None
    if manifest is None or not isinstance(manifest.facts, PublishFacts):
        return None
    facts = manifest.facts
    if facts.below is None:
        is_repository = facts.target.startswith(SCHEME)
        target = facts.target.partition("@")[0]
        place = f"{target}@{facts.revision}" if is_repository else facts.published_url
        notes.append(f"The publication lies outside of the storage: trainflow verify {place}.")
        return None
    return storage.child(facts.below)


# -- the lineage ------------------------------------------------------------------------------------------------------


def _read(folder: Store, found: _Found, link: str, lenient: bool) -> Lineage | None:
    try:
        return read_lineage_file(folder)
    except (ConfigError, DamagedError) as error:
        # A run's folder is the user's own; of a publication, its commit file shows whether the file was altered.
        is_damage = link == "run" or isinstance(error, DamagedError) or _is_recorded_otherwise(folder)
        if not (lenient and is_damage):
            raise
        found.damage.append((link, f"{FILE}: {error.message.removesuffix('.')}"))
        return None


def _is_recorded_otherwise(folder: Store) -> bool:
    """Whether a commit file lists the lineage with other bytes than are there."""
    try:
        commit = read_commit(folder)
        entry = None if commit is None else commit.entry(FILE)
        return entry is not None and folder.digest(FILE) != entry.sha256
    except StorageError:
        return folder.exists(COMMIT)


def _merge(found: _Found, published: Lineage | None, recorded: Lineage | None) -> Lineage:
    """What a run recorded; the publication's own links come before those of the same stages."""
    whole = recorded
    if whole is None and found.run is not None and found.storage is not None:
        whole = compose_lineage(found.storage.url, found.storage.child(_RUNS, found.run.id), found.run.record)
        found.notes.append("The run has no record of its lineage, so its links are those that its stages committed.")
    if whole is None and published is None:
        return _alone(found)
    if published is None or whole is None:
        return published or whole or Lineage(name="")
    own = {link.stage: link for link in published.stages}
    return replace(whole, stages=tuple(own.get(link.stage, link) for link in whole.stages))


def _alone(found: _Found) -> Lineage:
    """A stage that no run names: itself, as it is committed."""
    if found.key is None:
        return Lineage(name="")
    stage, key = found.key
    found.notes.append("No run on the storage names this result, so only the stage itself is known.")
    commit = None if found.storage is None else _read_commit(stage_folder(found.storage, stage, key))[0]
    link = StageLink(stage=stage, key=key, content_digest=None if commit is None else commit.content_digest)
    return Lineage(name="", stages=(link,))
