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

from trainer_lib.errors import ConfigError, DamagedError, StorageError
from trainer_lib.hub.base import SCHEME, parse_target
from trainer_lib.hub.folder import REVISIONS, FolderHub
from trainer_lib.hub.huggingface import RECORD, download_snapshot
from trainer_lib.model_folder.lineage import FILE, Lineage, StageLink, read_lineage_file
from trainer_lib.model_folder.locate import find_model, open_link
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, Commit, read_commit
from trainflow.flows.records.past_runs import RUN_FILE, PastRun, find_run, list_runs, read_run, run_folder
from trainflow.flows.records.recorded_spec import compose_lineage
from trainflow.tasks.stage.facts import PublishFacts
from trainflow.tasks.stage.manifest import STAGES, look_up_in, stage_folder

FIELD = "X"
_PUSH = "push-to-hub"


@dataclass
class Chain:
    """The links that an address leads to."""

    address: str  # as it was given
    kind: str  # publication, run, stage, checkpoint or model
    storage: Store | None = None  # where the stages and runs are; None: not known from here
    publication: Store | None = None  # the published folder; None: there is none, or it cannot be reached from here
    run: PastRun | None = None  # the run on the storage
    stage: tuple[str, str] | None = None  # the stage and key that the address names
    lineage: Lineage = field(default_factory=lambda: Lineage(name=""))  # what is known of all links, the newest last
    published: Lineage | None = None  # the lineage in it; None: there is none, or it cannot be read
    # The lineage that the run recorded when it ended; None: `lineage` was made from its stages.
    recorded: Lineage | None = None
    notes: list[str] = field(default_factory=list)  # sentences about links that are not known
    # What is wrong with lineage files themselves, as (link, sentence).
    damage: list[tuple[str, str]] = field(default_factory=list)
    altered: DamagedError | None = None  # the damage of the run's record, which is taken all the same

    @property
    def run_folder(self) -> Store | None:
        """The run's folder on the storage."""
        return None if self.storage is None or self.run is None else run_folder(self.storage.url, self.run.id)

    def stage_folder(self, link: StageLink | None) -> Store | None:
        """The folder of a stage's result; None where no storage, or no such link, is known."""
        return None if self.storage is None or link is None else stage_folder(self.storage, link.stage, link.key)

    def take_altered(self, error: DamagedError) -> bool:
        """Take the run's record although it was altered."""
        self.altered = error
        self.damage.append(("run", f"{RUN_FILE}: {error.message.removesuffix('.')}"))
        return True


def find_chain(address: str, *, storage: str | None = None, home: str | None = None, lenient: bool = False) -> Chain:
    """The chain that an address is a link of. Raises ConfigError, StorageError, and DamagedError for an altered file.

    Args:
        storage: the storage of its run, where the address is not below it.
        home: the storage in which an id or a name is looked for; `storage` comes before it.
        lenient: a damaged lineage file becomes `Chain.damage`, for `trainflow verify`; a file that trainflow did not
            write is refused all the same.
    """
    chain = _identify(address, storage, home)
    if chain.altered is not None and not lenient:
        raise chain.altered
    if storage is not None:
        chain.storage = Store.open(storage, field="--storage")
    if chain.publication is not None:
        chain.published = _read(chain, chain.publication, "publication", lenient)
        if chain.published is None and not chain.damage:
            what = f"The folder has no {FILE}: an older trainflow published it, or another program."
            remedy = "Run its pipeline again, which publishes it with its lineage."
            raise ConfigError(what, field=FIELD, value=address, remedy=remedy)
    chain.run = chain.run or _find_run_of(chain)
    if (folder := chain.run_folder) is not None:
        chain.recorded = _read(chain, folder, "run", lenient)
        if chain.publication is None and (published := _published_folder(chain)) is not None:
            chain.publication = published
            chain.published = _read(chain, published, "publication", lenient)
    chain.lineage = _merge(chain)
    return chain


def _identify(address: str, storage: str | None, home: str | None) -> Chain:
    if address.startswith(SCHEME):
        target = parse_target(address, field=FIELD)
        folder = download_snapshot(target.repo or address, revision=target.revision)
        return Chain(address, "publication", publication=Store.open(folder))
    if address.startswith("models:/"):
        model = find_model(address)
        # The weights are in the train stage, or in a checkpoint of it.
        weights = _above(model.weights, 1) if model.checkpoint is None else model.checkpoints.child(model.checkpoint)
        return replace(_of_folder(weights, address), kind="model")
    if "/" in address or Path(address).exists():
        return _of_folder(open_link(address, field=FIELD), address)
    place = storage or home
    if place is None:
        what = "This is neither a folder nor a URL, and no storage is known in which it could be a run."
        remedy = "Name the storage of the run (--storage URL), or a run's, stage's or published folder."
        raise ConfigError(what, field=FIELD, value=address, remedy=remedy)
    return Chain(address, "run", Store.open(place), run=find_run(place, address, field=FIELD, needs="train"))


def _of_folder(store: Store, address: str) -> Chain:
    parts = store.url.rstrip("/").split("/")
    if store.exists(RUN_FILE):
        chain = Chain(address, "run", _above(store, 2))
        storage = _above(store, 2).url
        chain.run = read_run(storage, parts[-1], chain.take_altered) or find_run(storage, parts[-1], field=FIELD)
        return chain
    commit, is_damaged = _read_commit(store)
    is_stage, is_checkpoint = parts[-3:-2] == [STAGES], parts[-2:-1] == ["checkpoints"]
    kind = None if commit is None else commit.kind
    if (commit is None and not is_damaged and store.exists(FILE)) or store.exists(RECORD):
        return _of_publication(store, address)
    if kind == "stage" or (is_stage and (is_damaged or kind == "published")):
        return _of_stage(store, store, address)
    # A damaged commit file does not say of what it is; the folder's place does.
    if is_checkpoint and (is_damaged or kind in ("checkpoint", "published")):
        return _of_stage(_above(store, 2), store, address)
    if is_damaged or kind == "published":
        return _of_publication(store, address)
    name = FolderHub(store.url, field=FIELD).newest_name()
    if name is not None:
        return _of_publication(store.child(REVISIONS, name), address)
    raise ConfigError(
        "There is no lineage: this is neither a publication, nor a run, a stage or a checkpoint.",
        field=FIELD,
        value=address,
        remedy="Give <storage>/runs/<run>, <storage>/stages/<stage>/<key>, a published folder, hf://organisation/name, "
        "models:/name@alias, or the id of a run with --storage URL.",
    )


def _of_publication(store: Store, address: str) -> Chain:
    """A publication; its storage is known of `<storage>/hub/<name>/revisions/<revision>` alone."""
    parts = store.url.rstrip("/").split("/")
    storage = _above(store, 4) if len(parts) >= 5 and (parts[-4], parts[-2]) == ("hub", REVISIONS) else None
    is_storage = storage is not None and bool(storage.children(STAGES))
    return Chain(address, "publication", storage if is_storage else None, store)


def _of_stage(stage: Store, store: Store, address: str) -> Chain:
    commit, _ = _read_commit(stage)
    meta = {} if commit is None else commit.meta
    parts = stage.url.rstrip("/").split("/")
    # Without a commit file the names of the folders say which stage and key these are.
    named = (str(meta.get("stage", parts[-2])), str(meta.get("key", parts[-1])))
    return Chain(address, "stage" if stage is store else "checkpoint", _above(stage, 3), stage=named)


def _read_commit(store: Store) -> tuple[Commit | None, bool]:
    """The commit of a folder, and whether it is damaged."""
    try:
        return read_commit(store), False
    except DamagedError:
        return None, True


def _above(store: Store, levels: int) -> Store:
    return Store.open(store.url.rstrip("/").rsplit("/", levels)[0] or "/")


def _find_run_of(chain: Chain) -> PastRun | None:
    """The newest run that has the stage's result, or all of those that the publication names."""
    wanted = dict([chain.stage]) if chain.stage is not None else {}
    if chain.published is not None:
        wanted = {link.stage: link.key for link in chain.published.stages}
    for run in list_runs(chain.storage.url) if chain.storage is not None and wanted and all(wanted.values()) else ():
        if all(run.stages.get(stage, "").startswith(key) for stage, key in wanted.items()):
            return run
    return None


def _published_folder(chain: Chain) -> Store | None:
    """The folder to which the run published, below its storage; what is elsewhere is not followed."""
    key = None if chain.run is None else chain.run.stages.get(_PUSH)
    if key is None or chain.storage is None:
        return None
    manifest = look_up_in(chain.storage.url, _PUSH, key)
    facts = None if manifest is None else manifest.facts
    if not isinstance(facts, PublishFacts) or facts.held is not None:
        return None
    if facts.below is not None:
        return chain.storage.child(facts.below)
    is_repository = facts.target.startswith(SCHEME)
    place = f"{facts.target.partition('@')[0]}@{facts.revision}" if is_repository else facts.published_url
    chain.notes.append(f"The publication lies outside of the storage: trainflow verify {place}.")
    return None


def _read(chain: Chain, folder: Store, link: str, lenient: bool) -> Lineage | None:
    try:
        return read_lineage_file(folder)
    except (ConfigError, DamagedError) as error:
        # A run's folder is the user's; of a publication, its commit file shows whether the file was altered.
        is_damage = link == "run" or isinstance(error, DamagedError) or _is_recorded_otherwise(folder)
        if not (lenient and is_damage):
            raise
        chain.damage.append((link, f"{FILE}: {error.message.removesuffix('.')}"))
        return None


def _is_recorded_otherwise(folder: Store) -> bool:
    """Whether a commit file lists the lineage with other bytes than are there."""
    try:
        commit = read_commit(folder)
        entry = None if commit is None else commit.entry(FILE)
        return entry is not None and folder.digest(FILE) != entry.sha256
    except StorageError:
        return folder.exists(COMMIT)


def _merge(chain: Chain) -> Lineage:
    """The links that the run recorded; the publication's links come before those of the same stages."""
    whole, published = chain.recorded, chain.published
    if whole is None and chain.storage is not None and chain.run is not None and chain.run_folder is not None:
        whole = compose_lineage(chain.storage.url, chain.run_folder, chain.run.record)
        chain.notes.append("The run has no record of its lineage, so its links are those that its stages committed.")
    if whole is not None and published is not None:
        links = {link.stage: link for link in published.stages}
        return replace(whole, stages=tuple(links.get(link.stage, link) for link in whole.stages))
    if whole is not None or published is not None or chain.stage is None:
        return whole or published or chain.lineage
    # A stage that no run names: itself, as it is committed.
    stage, key = chain.stage
    chain.notes.append("No run on the storage names this result, so only the stage itself is known.")
    commit = None if chain.storage is None else _read_commit(stage_folder(chain.storage, stage, key))[0]
    link = StageLink(stage=stage, key=key, content_digest=None if commit is None else commit.content_digest)
    return Lineage(name="", stages=(link,))
