"""`trainflow verify`: every link of a lineage is hashed again, and the file that breaks one is named.

What cannot be reached from this machine is reported as not checked, with the reason; it never counts as held. Files are
read in pieces, so a model that is larger than memory is verified as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import (
    BrokenLineageError,
    ConfigError,
    DamagedError,
    InfrastructureError,
    StorageError,
    StoreUnreachableError,
)
from trainer_lib.hub.base import ADAPTER
from trainer_lib.hub.huggingface import MAX_RECORD_BYTES, RECORD
from trainer_lib.model_folder.lineage import FILE, CheckpointLink, StageLink
from trainer_lib.model_folder.locate import find_model
from trainer_lib.secrets import mask
from trainer_lib.storage import FileEntry, Store, relative_problem
from trainer_lib.storage.commit import COMMIT, Commit, content_digest, read_commit, verify_files
from trainer_lib.trackers.mlflow.mlflow_client import TOKEN_TAG, GoneError, connect_timed
from trainer_lib.trackers.mlflow.mlflow_registry import list_versions
from trainer_lib.trackers.mlflow.model_record import DIGEST_TAG
from trainer_lib.trackers.mlflow.shipper import Clock, shorten
from trainflow.flows.lineage.lineage_chain import Chain
from trainflow.flows.records.recorded_spec import read_spec_record
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.keys.keys import canonical
from trainflow.tasks.keys.sources import find_absent, find_remote, fingerprints
from trainflow.tasks.model.model_lineage import MODEL, find_inputs
from trainflow.tasks.stage.facts import PublishFacts
from trainflow.tasks.stage.manifest import KEY_FILE, StageManifest
from trainflow.tasks.tracking.mlflow_run import find_run_id, tracking_uri

State = Literal["held", "broken", "not checked"]
_KEY_BYTES = 16 << 20
_TAG = "trainflow."
_SHORT = 16
"""Characters of a key that a run's tag has."""
_SQLITE = "sqlite:///"
_MOST = 20
"""Problems of one link that are named."""


@dataclass(frozen=True)
class LinkCheck:
    """One link.

    Attributes:
        where: address of what was read.
        files, bytes: what was hashed.
        problems: sentences that begin with the file, or with what else breaks the link.
        why: why it was not checked.
    """

    link: str
    state: State
    where: str = ""
    files: int = 0
    bytes: int = 0
    problems: tuple[str, ...] = ()
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


@dataclass
class _Looked:
    """Progress and findings of a check."""

    files: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, entries: Iterable[FileEntry]) -> None:
        for entry in entries:
            self.files += 1
            self.bytes += entry.size


class _NotCheckedError(Exception):
    """A link cannot be reached from here; the text says why."""


def find_failure(checks: Sequence[LinkCheck]) -> BrokenLineageError | ConfigError | None:
    """The failure of a verification: the first link that is broken, or that nothing could be checked; None: it held."""
    broken = [check for check in checks if check.state == "broken"]
    if broken:
        first = broken[0]
        more = f" {len(broken) - 1} more of the {len(checks)} links do not hold." if len(broken) > 1 else ""
        return BrokenLineageError(
            f"The link {first.link} does not hold: {first.problems[0]}.{more}",
            field=first.link,
            value=first.where or None,
            remedy="Restore the file, or run the pipeline again: what is damaged is made again.",
        )
    if any(check.state == "held" for check in checks):
        return None
    return ConfigError(
        "No link could be checked from here.", field="X", remedy="Name the storage of the run: --storage URL."
    )


def verify_chain(chain: Chain, config: TrackingConfig) -> Iterator[LinkCheck]:
    """Hash every link of a chain again.

    Args:
        config: the tracking settings that name the MLflow server.
    """
    if chain.lineage.sources:
        yield _check("sources", "", partial(_look_at_sources, chain))
    for link in chain.lineage.stages:
        folder = chain.stage_folder(link)
        where = "" if folder is None else folder.url
        yield _check(link.stage, where, partial(_look_at_stage, chain, link))
        if link.stage == "train":
            for each in chain.lineage.checkpoints:
                place = "" if folder is None else f"{folder.url}/checkpoints/{each.name}"
                yield _check(each.name, place, partial(_look_at_checkpoint, chain, each))
    if chain.publication is not None:
        yield _check("publication", chain.publication.url, partial(_look_at_publication, chain))
    elif chain.lineage.publication is not None:
        why = next((note for note in chain.notes if "publication" in note), "it cannot be reached from here")
        yield LinkCheck("publication", "not checked", why=why)
    if (folder := chain.run_folder) is not None:
        yield _check("run", folder.url, partial(_look_at_run, chain))
    yield from _tracked_checks(chain, config)


def _check(link: str, where: str, look: Callable[[_Looked], None]) -> LinkCheck:
    seen = _Looked()
    try:
        look(seen)
    except _NotCheckedError as reason:
        return LinkCheck(link, "not checked", where, why=str(reason))
    except DamagedError as error:
        seen.problems.append(f"{(error.field or where).rpartition('/')[2]}: {error.message.removesuffix('.')}")
    except (StorageError, ConfigError) as error:
        return LinkCheck(link, "not checked", where, why=error.message)
    problems = tuple(seen.problems[:_MOST])
    return LinkCheck(link, "broken" if problems else "held", where, seen.files, seen.bytes, problems)


# -- stages and checkpoints -------------------------------------------------------------------------------------------


def _look_at_stage(chain: Chain, link: StageLink, seen: _Looked) -> None:
    store = _reach(chain.stage_folder(link))
    commit = _read(store, "stage")
    key = str(commit.meta.get("key"))
    if commit.meta.get("stage") != link.stage or not key.startswith(link.key):
        seen.problems.append(f"{COMMIT}: this is the result of another stage or key")
    if link.content_digest not in (None, commit.content_digest):
        recorded = str(link.content_digest)[:12]
        seen.problems.append(f"{COMMIT}: the result is {commit.content_digest[:12]}…, the lineage has {recorded}…")
    _look_at_files(store, commit, seen)
    fields = _look_at_key(store, key, link.stage, seen)
    known = {each.stage: each.content_digest for each in chain.lineage.stages}
    for stage, digest in find_inputs(fields).items():
        if known.get(stage) not in (None, digest):
            seen.problems.append(f"{KEY_FILE}: made from another result of {stage} than the lineage has")
    if link.stage == "push-to-hub":
        _compare_publication(chain, store, commit, seen)


def _look_at_files(store: Store, commit: Commit, seen: _Looked) -> None:
    seen.add(commit.files)
    seen.problems += verify_files(store, commit)


def _look_at_key(store: Store, key: str, stage: str, seen: _Looked) -> dict[str, Any]:
    """Hash the fields of a stage's key again; the key is their digest."""
    data = store.read_if_exists(KEY_FILE, limit=_KEY_BYTES)
    if data is None:
        seen.problems.append(f"{KEY_FILE}: missing")
        return {}
    try:
        record = parse_json(data)
        fields: dict[str, Any] = dict(record["fields"])
        digest = hashlib.sha256(canonical({"stage": stage, **fields})).hexdigest()
    except (ValueError, KeyError, TypeError):
        seen.problems.append(f"{KEY_FILE}: is not what trainflow writes")
        return {}
    if {digest, record.get("key")} != {key} or record.get("stage") != stage:
        seen.problems.append(f"{KEY_FILE}: its fields have the digest {digest[:12]}…, the key is {key[:12]}…")
    return fields


def _look_at_checkpoint(chain: Chain, link: CheckpointLink, seen: _Looked) -> None:
    stage = _reach(chain.stage_folder(chain.lineage.stage("train")))
    store = stage.child("checkpoints", link.name)
    commit = _read(store, "checkpoint")
    if commit.content_digest != link.content_digest:
        digests = f"{commit.content_digest[:12]}…, the lineage has {link.content_digest[:12]}…"
        seen.problems.append(f"{COMMIT}: the checkpoint is {digests}")
    _look_at_files(store, commit, seen)


def _compare_publication(chain: Chain, store: Store, commit: Commit, seen: _Looked) -> None:
    """Compare what push-to-hub says it published with what the run recorded."""
    facts = StageManifest.from_commit(store.url, commit).facts
    recorded = chain.recorded.publication if chain.recorded is not None else None
    if recorded is None or not isinstance(facts, PublishFacts):
        return
    if (facts.revision, facts.published_digest) != (recorded.revision, recorded.content_digest):
        seen.problems.append(f"{COMMIT}: another publication than the one that the run recorded")


# -- publications and runs --------------------------------------------------------------------------------------------


def _look_at_publication(chain: Chain, seen: _Looked) -> None:
    store = _reach(chain.publication)
    entries = _published_entries(store, chain)
    seen.add(entries)
    seen.problems += _compare_files(store, entries)
    named = {sentence.partition(":")[0] for sentence in seen.problems}
    seen.problems += [text for link, text in chain.damage if link == "publication" and FILE not in named]
    listed = {entry.path: entry for entry in entries}
    for entry in chain.published.files if chain.published is not None else ():
        if entry.path not in listed:
            seen.problems.append(f"{FILE}: names {entry.path}, which is not part of the publication")
        elif listed[entry.path] != entry:
            seen.problems.append(f"{FILE}: names other bytes of {entry.path} than were published")
    _compare_with_training(chain, listed, seen)
    # An address of a publication may be an older one than the run's.
    recorded = chain.recorded.publication if chain.recorded is not None and chain.kind != "publication" else None
    if recorded is not None and content_digest(entries) != recorded.content_digest:
        seen.problems.append(f"{COMMIT}: the run published {recorded.content_digest[:12]}…, and this is another one")


def _published_entries(store: Store, chain: Chain) -> list[FileEntry]:
    """The publication's files, by its commit file, the Hub's record, or else its lineage."""
    commit = read_commit(store, kind="published")
    if commit is not None:
        return list(commit.files)
    if store.exists(RECORD):
        return list(_hub_entries(store))
    if any(link == "publication" for link, _ in chain.damage):
        return []
    if chain.published is None:
        raise _NotCheckedError("nothing is committed there; it was removed")
    return list(chain.published.files)


def _hub_entries(store: Store) -> Iterator[FileEntry]:
    try:
        record = parse_json(store.read_bytes(RECORD, limit=MAX_RECORD_BYTES))
        entries = [FileEntry(str(each["path"]), int(each["size"]), str(each["sha256"])) for each in record["files"]]
        digest = record["content_digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError("This is not what trainflow writes.", field=f"{store.url}/{RECORD}") from error
    if any(relative_problem(entry.path) for entry in entries):
        raise ConfigError(
            "The record of the publication names a path that leads out of it.",
            field=f"{store.url}/{RECORD}",
            remedy="Nothing in it was used.",
        )
    if content_digest(entries) != digest:
        raise DamagedError("Its files have another digest than it states.", field=f"{store.url}/{RECORD}")
    yield from entries


def _compare_files(store: Store, entries: Iterable[FileEntry]) -> Iterator[str]:
    """Differences from the listed files; links are followed, because a download of the Hub consists of them."""
    for entry in entries:
        if not store.exists(entry.path):
            yield f"{entry.path}: missing"
        elif (size := store.size(entry.path)) != entry.size:
            yield f"{entry.path}: {size:,} bytes, published {entry.size:,}"
        elif (digest := store.digest(entry.path)) != entry.sha256:
            yield f"{entry.path}: digest {digest[:12]}…, published {entry.sha256[:12]}…"


def _compare_with_training(chain: Chain, listed: dict[str, FileEntry], seen: _Looked) -> None:
    """The published weights are those that train committed, where the storage can be read."""
    folder = chain.stage_folder(chain.lineage.stage("train"))
    try:
        commit = None if folder is None else read_commit(folder, kind="stage")
    except StorageError:  # its own link says so
        return
    for entry in commit.files if commit is not None else ():
        path = entry.path.removeprefix(MODEL)
        if path not in listed:  # adapters beside the weights that they are merged into
            path = f"{ADAPTER}/{path}"
        is_weights = entry.path.startswith(MODEL) and path.endswith(".safetensors") and path in listed
        if is_weights and listed[path].sha256 != entry.sha256:
            seen.problems.append(f"{path}: not the weights that train committed")


def _look_at_run(chain: Chain, seen: _Looked) -> None:
    """The spec, the recipe and the description that the run kept."""
    folder = _reach(chain.run_folder)
    seen.problems += [text for link, text in chain.damage if link == "run"]
    if chain.recorded is not None:
        entries = chain.recorded.files
    elif seen.problems:
        return
    else:
        raise _NotCheckedError("it has no record of its lineage: it has not ended, or an older trainflow recorded it")
    seen.add(entries)
    seen.problems += _compare_files(folder, entries)
    for link in chain.recorded.stages:
        if chain.run is not None and chain.run.stages.get(link.stage) != link.key:
            seen.problems.append(f"run.json: names another result of {link.stage} than the lineage")


# -- sources, MLflow --------------------------------------------------------------------------------------------------


def _look_at_sources(chain: Chain, seen: _Looked) -> None:
    """The sources of the data, where they lie on this machine."""
    if chain.storage is None or chain.run is None:
        raise _NotCheckedError("only their digests are known here; the data itself is not part of a publication")
    raw = read_spec_record(chain.storage.url, chain.run)
    prepare = raw.get("prepare") or {}
    sources = [str(each) for each in prepare.get("sources") or ()]
    if missing := [*find_absent(sources), *find_remote(sources)]:
        raise _NotCheckedError(f"{missing[0]} does not lie on this machine")
    recorded = {each.source: each.digest for each in chain.lineage.sources}
    for found in fingerprints(sources, root=raw.get("root")):
        seen.files += 1
        label = found["source"]
        if recorded.get(label) == found["digest"]:
            continue
        if label.startswith(("package:", "stdlib:")):
            raise _NotCheckedError(f"{label} is installed here in another version than the data was made from")
        seen.problems.append(f"{label}: changed since the data was prepared")


def _tracked_checks(chain: Chain, config: TrackingConfig) -> Iterator[LinkCheck]:
    if chain.lineage.tracked_run is None and chain.lineage.mlflow_run_id is None:
        return
    try:
        found = find_tracked(chain, config)
        problems = list(find_tracked_problems(chain, found))
    except (ConfigError, StorageError) as error:
        yield LinkCheck("MLflow run", "not checked", why=error.message)
        return
    names = ["MLflow run", *(f"{each['name']} version {each['version']}" for each in found.versions)]
    for name in names:
        mine = tuple(sentence for link, sentence in problems if link == name)
        where = f"{found.run_id} in {found.uri}" if name == names[0] else found.uri
        yield LinkCheck(name, "broken" if mine else "held", where, problems=mine)


# -- reaching ---------------------------------------------------------------------------------------------------------


def _reach(store: Store | None) -> Store:
    if store is None:
        raise _NotCheckedError("its storage is not known here; --storage URL names it")
    return store


def _read(store: Store, kind: str) -> Commit:
    commit = read_commit(store, kind=kind)
    if commit is not None:
        return commit
    if store.children():
        raise DamagedError("The commit file is missing.", field=f"{store.url}/{COMMIT}")
    raise _NotCheckedError("it is not on the storage any more")


# -- MLflow -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrackedLinks:
    """A chain's records in MLflow.

    Attributes:
        uri: its address, without credentials.
        run_id: of the run.
        tags: of the run.
        versions: of registered models: name, version, aliases, and the tags that trainflow gave it.
        digest: under which the registry has the model of the chain; None where its run does not describe it.
    """

    uri: str
    run_id: str
    tags: Mapping[str, str]
    versions: tuple[Mapping[str, Any], ...] = ()
    digest: str | None = None


def find_tracked(chain: Chain, config: TrackingConfig) -> TrackedLinks:
    """Ask the tracking server that this machine uses for the run of a chain.

    Raises:
        ConfigError: there is nothing to ask: no server is known, or it does not have the run.
        StoreUnreachableError: it does not answer.
    """
    lineage = chain.lineage
    if lineage.mlflow_run_id is None and lineage.tracked_run is None:
        raise ConfigError("The run was not tracked.")
    uri = tracking_uri(config, chain.storage) if chain.storage is not None else os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        raise ConfigError("No tracking server is known here; MLFLOW_TRACKING_URI names one.")
    if uri.startswith(_SQLITE) and not Path(uri.removeprefix(_SQLITE)).is_file():
        raise ConfigError("The database of MLflow is not on this machine.")
    try:
        client: Any = connect_timed(uri, Clock())
        run = _find_run(client, chain)
        if run is None:
            raise ConfigError(f"The tracking server {mask(uri)} does not have the run.")
        digest = _model_digest(chain)
        versions = tuple(_versions(client, digest, run))
        return TrackedLinks(mask(uri), run.info.run_id, dict(run.data.tags), versions, digest)
    except ConfigError:
        raise
    except Exception as error:  # whatever mlflow raises
        raise StoreUnreachableError(
            f"The tracking server does not answer: {shorten(error)}.", field="tracking", value=mask(uri)
        ) from error


def find_tracked_problems(chain: Chain, found: TrackedLinks) -> Iterator[tuple[str, str]]:
    """Differences between a chain and its records in MLflow, as (link, sentence)."""
    for link in chain.lineage.stages:
        tag = found.tags.get(f"{_TAG}{link.stage}")
        if tag is not None and tag != link.key[:_SHORT]:
            yield "MLflow run", f"tag {_TAG}{link.stage}: {tag}, the lineage has {link.key[:_SHORT]}"
    published = chain.lineage.publication
    tag = found.tags.get("trainflow.published_digest")
    if published is not None and tag is not None and tag != published.content_digest:
        yield "MLflow run", f"tag trainflow.published_digest: {tag[:12]}…, published {published.content_digest[:12]}…"
    digest = found.digest
    for version in found.versions:
        name = f"{version['name']} version {version['version']}"
        if digest is not None and version["tags"].get(DIGEST_TAG) != digest:
            yield name, f"tag {DIGEST_TAG}: {version['tags'].get(DIGEST_TAG)}, the model has {digest}"
        for link in chain.lineage.stages:
            tag = version["tags"].get(f"{_TAG}{link.stage}")
            if tag is not None and tag != link.key:
                yield name, f"tag {_TAG}{link.stage}: {tag[:_SHORT]}, the lineage has {link.key[:_SHORT]}"


def _find_run(client: Any, chain: Chain) -> Any:
    lineage = chain.lineage
    run_id = lineage.mlflow_run_id
    if run_id is None and chain.storage is not None:
        run_id = find_run_id(chain.storage, lineage.tracked_run)
    if run_id is not None:
        with contextlib.suppress(GoneError):
            return client.get_run(run_id)
        return None
    experiments = [each.experiment_id for each in client.search_experiments()]
    query = f"tags.`{TOKEN_TAG}` = '{lineage.tracked_run}'"
    found = client.search_runs(experiments, query, max_results=1)
    return found[0] if found else None


def _versions(client: Any, digest: str | None, run: Any) -> Iterator[dict[str, Any]]:
    """The versions that the run registered, and those of the same model."""
    for each in list_versions(client):
        if each["run_id"] == run.info.run_id or (digest is not None and each["digest"] == digest):
            shown = {key: value for key, value in each["tags"].items() if key.startswith(_TAG)}
            yield {"name": each["name"], "version": each["version"], "aliases": each["aliases"], "tags": shown}


def _model_digest(chain: Chain) -> str | None:
    """The digest under which the registry has the model; None where the run does not describe it."""
    folder = chain.run_folder or chain.publication
    if folder is None:
        return None
    try:
        return find_model(folder.url).digest()
    except (ConfigError, StorageError, InfrastructureError):
        return None
