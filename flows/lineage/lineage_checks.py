"""`trainflow verify`: every link of a lineage is hashed again, and the file that breaks one is named.

What cannot be reached from this machine is reported as not checked, with the reason; it never counts as held. Files are
read in pieces, so a model that is larger than memory is verified as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from trainer_lib.model_folder.lineage import FILE, StageLink
from trainer_lib.model_folder.locate import find_model
from trainer_lib.secrets import mask
from trainer_lib.storage import FileEntry, Store, relative_problem
from trainer_lib.storage.commit import COMMIT, Commit, content_digest, read_commit, verify_files
from trainer_lib.trackers.mlflow.mlflow_client import TOKEN_TAG, Clock, GoneError, connect_timed, shorten
from trainer_lib.trackers.mlflow.mlflow_registry import DIGEST_TAG, list_versions
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
_SHORT = 16  # characters of a key that a run's tag has
_SQLITE = "sqlite:///"
_MOST = 20  # problems of one link that are named


@dataclass(frozen=True)
class LinkCheck:
    """One link: what was hashed of it, sentences about what breaks it (the file first), or why it was not checked."""

    link: str
    state: State
    where: str = ""
    files: int = 0
    bytes: int = 0
    problems: tuple[str, ...] = ()
    why: str = ""


class _NotCheckedError(Exception):
    """A link cannot be reached from here; the text says why."""


def find_failure(checks: Sequence[LinkCheck]) -> BrokenLineageError | ConfigError | None:
    """The failure of a verification: the first link that is broken, or that nothing could be checked; None: it held."""
    broken = [check for check in checks if check.state == "broken"]
    if broken:
        first = broken[0]
        more = f" {len(broken) - 1} more of the {len(checks)} links do not hold." if len(broken) > 1 else ""
        what = f"The link {first.link} does not hold: {first.problems[0]}.{more}"
        remedy = "Restore the file, or run the pipeline again: what is damaged is made again."
        return BrokenLineageError(what, field=first.link, value=first.where or None, remedy=remedy)
    if any(check.state == "held" for check in checks):
        return None
    return ConfigError(
        "No link could be checked from here.", field="X", remedy="Name the storage of the run: --storage URL."
    )


def verify_chain(chain: Chain, config: TrackingConfig) -> Iterator[LinkCheck]:
    """Hash every link of a chain again; `config` names the MLflow server."""
    if chain.lineage.sources:
        yield _check("sources", None, lambda hashed: _look_at_sources(chain, hashed))
    for link in chain.lineage.stages:
        yield _check(link.stage, chain.stage_folder(link), partial(_look_at_stage, chain, link))
        for checkpoint in chain.lineage.checkpoints if link.stage == "train" else ():
            folder = chain.stage_folder(link)
            place = None if folder is None else folder.child("checkpoints", checkpoint.name)
            look = partial(_look_at_commit, place, "checkpoint", checkpoint.content_digest)
            yield _check(checkpoint.name, place, look)
    if chain.publication is not None:
        yield _check("publication", chain.publication, partial(_look_at_publication, chain, chain.publication))
    elif chain.lineage.publication is not None:
        why = next((note for note in chain.notes if "publication" in note), "it cannot be reached from here")
        yield LinkCheck("publication", "not checked", why=why)
    if (folder := chain.run_folder) is not None:
        yield _check("run", folder, partial(_look_at_run, chain, folder))
    yield from _tracked_checks(chain, config)


def _check(link: str, place: Store | None, look: Callable[[list[int]], Iterator[str]]) -> LinkCheck:
    """Check a link by a function that yields what breaks it, and adds the sizes of the files that it hashes."""
    where = "" if place is None else place.url
    hashed: list[int] = []
    problems: list[str] = []
    try:
        for problem in look(hashed):
            problems.append(problem)
    except _NotCheckedError as reason:
        return LinkCheck(link, "not checked", where, why=str(reason))
    except DamagedError as error:
        problems.append(f"{(error.field or where).rpartition('/')[2]}: {error.message.removesuffix('.')}")
    except (StorageError, ConfigError) as error:
        return LinkCheck(link, "not checked", where, why=error.message)
    state: State = "broken" if problems else "held"
    return LinkCheck(link, state, where, len(hashed), sum(hashed), tuple(problems[:_MOST]))


# -- stages and checkpoints -------------------------------------------------------------------------------------------


def _look_at_commit(
    store: Store | None, kind: str, digest: str | None, hashed: list[int]
) -> Generator[str, None, tuple[Store, Commit]]:
    """Hash the files of a committed folder, and compare their digest with the one in the lineage."""
    if store is None:
        raise _NotCheckedError("its storage is not known here; --storage URL names it")
    commit = _read(store, kind)
    if digest not in (None, commit.content_digest):
        result = "result" if kind == "stage" else kind
        yield f"{COMMIT}: the {result} is {commit.content_digest[:12]}…, the lineage has {str(digest)[:12]}…"
    hashed += [entry.size for entry in commit.files]
    yield from verify_files(store, commit)
    return store, commit


def _look_at_stage(chain: Chain, link: StageLink, hashed: list[int]) -> Iterator[str]:
    store, commit = yield from _look_at_commit(chain.stage_folder(link), "stage", link.content_digest, hashed)
    key = str(commit.meta.get("key"))
    if commit.meta.get("stage") != link.stage or not key.startswith(link.key):
        yield f"{COMMIT}: this is the result of another stage or key"
    try:
        record = parse_json(store.read_if_exists(KEY_FILE, limit=_KEY_BYTES) or b"")
        fields: dict[str, Any] = dict(record["fields"])
        # The key is the digest of its fields.
        digest = hashlib.sha256(canonical({"stage": link.stage, **fields})).hexdigest()
    except (ValueError, KeyError, TypeError):
        yield f"{KEY_FILE}: missing, or not what trainflow writes"
        return
    if {digest, record.get("key")} != {key} or record.get("stage") != link.stage:
        yield f"{KEY_FILE}: its fields have the digest {digest[:12]}…, the key is {key[:12]}…"
    known = {other.stage: other.content_digest for other in chain.lineage.stages}
    for stage, made_from in find_inputs(fields).items():
        if known.get(stage) not in (None, made_from):
            yield f"{KEY_FILE}: made from another result of {stage} than the lineage has"
    facts = StageManifest.from_commit(store.url, commit).facts
    recorded = chain.recorded.publication if chain.recorded is not None else None
    named = (facts.revision, facts.published_digest) if isinstance(facts, PublishFacts) else None
    if named and recorded is not None and named != (recorded.revision, recorded.content_digest):
        yield f"{COMMIT}: another publication than the one that the run recorded"


def _read(store: Store, kind: str) -> Commit:
    commit = read_commit(store, kind=kind)
    if commit is not None:
        return commit
    if store.children():
        raise DamagedError("The commit file is missing.", field=f"{store.url}/{COMMIT}")
    raise _NotCheckedError("it is not on the storage any more")


# -- publications and runs --------------------------------------------------------------------------------------------


def _look_at_publication(chain: Chain, store: Store, hashed: list[int]) -> Iterator[str]:
    entries = _published_entries(store, chain)
    differences = list(_compare_files(store, entries, hashed))
    yield from differences
    if not any(sentence.startswith(f"{FILE}:") for sentence in differences):
        yield from (text for link, text in chain.damage if link == "publication")
    listed = {entry.path: entry for entry in entries}
    for entry in chain.published.files if chain.published is not None else ():
        if listed.get(entry.path) != entry:
            yield f"{FILE}: names {entry.path} with other bytes than were published, or none were"
    yield from _compare_with_training(chain, listed)
    # An address of a publication may be an older one than the run's.
    recorded = chain.recorded.publication if chain.recorded is not None and chain.kind != "publication" else None
    if recorded is not None and content_digest(entries) != recorded.content_digest:
        yield f"{COMMIT}: the run published {recorded.content_digest[:12]}…, and this is another one"


def _published_entries(store: Store, chain: Chain) -> Sequence[FileEntry]:
    """The publication's files, by its commit file, the Hub's record, or else its lineage."""
    commit = read_commit(store, kind="published")
    if commit is not None:
        return commit.files
    if store.exists(RECORD):
        return _hub_entries(store)
    if any(link == "publication" for link, _ in chain.damage):
        return ()
    if chain.published is None:
        raise _NotCheckedError("nothing is committed there; it was removed")
    return chain.published.files


def _hub_entries(store: Store) -> list[FileEntry]:
    where = f"{store.url}/{RECORD}"
    try:
        record = parse_json(store.read_bytes(RECORD, limit=MAX_RECORD_BYTES))
        entries = [FileEntry(str(file["path"]), int(file["size"]), str(file["sha256"])) for file in record["files"]]
        digest = record["content_digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError("This is not what trainflow writes.", field=where) from error
    if any(relative_problem(entry.path) for entry in entries):
        what = "The record of the publication names a path that leads out of it."
        raise ConfigError(what, field=where, remedy="Nothing in it was used.")
    if content_digest(entries) != digest:
        raise DamagedError("Its files have another digest than it states.", field=where)
    return entries


def _compare_files(store: Store, entries: Iterable[FileEntry], hashed: list[int]) -> Iterator[str]:
    """Differences from the listed files; links are followed, because a download of the Hub consists of them."""
    for entry in entries:
        hashed.append(entry.size)
        if not store.exists(entry.path):
            yield f"{entry.path}: missing"
        elif (size := store.size(entry.path)) != entry.size:
            yield f"{entry.path}: {size:,} bytes, published {entry.size:,}"
        elif (digest := store.digest(entry.path)) != entry.sha256:
            yield f"{entry.path}: digest {digest[:12]}…, published {entry.sha256[:12]}…"


def _compare_with_training(chain: Chain, listed: Mapping[str, FileEntry]) -> Iterator[str]:
    """The published weights are those that train committed, where the storage can be read."""
    folder = chain.stage_folder(chain.lineage.stage("train"))
    try:
        commit = None if folder is None else read_commit(folder, kind="stage")
    except StorageError:  # its own link says so
        return
    for entry in commit.files if commit is not None else ():
        path = entry.path.removeprefix(MODEL)
        if path not in listed:  # adapters next to the weights that they are merged into
            path = f"{ADAPTER}/{path}"
        is_weights = entry.path.startswith(MODEL) and path.endswith(".safetensors") and path in listed
        if is_weights and listed[path].sha256 != entry.sha256:
            yield f"{path}: not the weights that train committed"


def _look_at_run(chain: Chain, folder: Store, hashed: list[int]) -> Iterator[str]:
    """The spec, the recipe and the description that the run kept."""
    damage = [text for link, text in chain.damage if link == "run"]
    yield from damage
    if chain.recorded is None:
        if not damage:
            raise _NotCheckedError("it has no record of its lineage, because it has not ended")
        return
    yield from _compare_files(folder, chain.recorded.files, hashed)
    for link in chain.recorded.stages:
        if chain.run is not None and chain.run.stages.get(link.stage) != link.key:
            yield f"run.json: names another result of {link.stage} than the lineage"


def _look_at_sources(chain: Chain, hashed: list[int]) -> Iterator[str]:
    """The sources of the data, where they lie on this machine."""
    if chain.storage is None or chain.run is None:
        raise _NotCheckedError("only their digests are known here; the data itself is not part of a publication")
    raw = read_spec_record(chain.storage.url, chain.run)
    sources = [str(source) for source in (raw.get("prepare") or {}).get("sources") or ()]
    if missing := [*find_absent(sources), *find_remote(sources)]:
        raise _NotCheckedError(f"{missing[0]} does not lie on this machine")
    recorded = {link.source: link.digest for link in chain.lineage.sources}
    for found in fingerprints(sources, root=raw.get("root")):
        hashed.append(0)
        label = found["source"]
        if recorded.get(label) == found["digest"]:
            continue
        if label.startswith(("package:", "stdlib:")):
            raise _NotCheckedError(f"{label} is installed here in another version than the data was made from")
        yield f"{label}: changed since the data was prepared"


# -- MLflow -----------------------------------------------------------------------------------------------------------


def _tracked_checks(chain: Chain, config: TrackingConfig) -> Iterator[LinkCheck]:
    if chain.lineage.tracked_run is None and chain.lineage.mlflow_run_id is None:
        return
    try:
        found = find_tracked(chain, config)
        problems = list(find_tracked_problems(chain, found))
    except (ConfigError, StorageError) as error:
        yield LinkCheck("MLflow run", "not checked", why=error.message)
        return
    names = ["MLflow run", *(f"{version['name']} version {version['version']}" for version in found.versions)]
    for name in names:
        mine = tuple(sentence for link, sentence in problems if link == name)
        where = f"{found.run_id} in {found.uri}" if name == names[0] else found.uri
        yield LinkCheck(name, "broken" if mine else "held", where, problems=mine)


@dataclass(frozen=True)
class TrackedLinks:
    """A chain's records in MLflow."""

    uri: str  # its address, without credentials
    run_id: str
    tags: Mapping[str, str]
    # Of registered models: name, version, aliases, and the tags that trainflow gave it.
    versions: tuple[Mapping[str, Any], ...] = ()
    # Under which the registry has the model of the chain; None where its run does not describe it.
    digest: str | None = None


def find_tracked(chain: Chain, config: TrackingConfig) -> TrackedLinks:
    """Ask this machine's tracking server for the run of a chain. Raises ConfigError for none, StoreUnreachableError."""
    lineage = chain.lineage
    if lineage.mlflow_run_id is None and lineage.tracked_run is None:
        raise ConfigError("The run was not tracked.")
    uri = tracking_uri(config, chain.storage) if chain.storage is not None else os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        raise ConfigError("No tracking server is known here; MLFLOW_TRACKING_URI names one.")
    if uri.startswith(_SQLITE) and not Path(uri.removeprefix(_SQLITE)).is_file():
        raise ConfigError("The database of MLflow is not on this machine.")
    digest: str | None = None
    try:
        client: Any = connect_timed(uri, Clock())
        run = _find_run(client, chain)
        if run is None:
            raise ConfigError(f"The tracking server {mask(uri)} does not have the run.")
        if (folder := chain.run_folder or chain.publication) is not None:
            with contextlib.suppress(ConfigError, StorageError, InfrastructureError):
                digest = find_model(folder.url).digest()
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
    keys = {f"{_TAG}{link.stage}": link.key for link in chain.lineage.stages}
    expected = {name: key[:_SHORT] for name, key in keys.items()}
    if (published := chain.lineage.publication) is not None:
        expected["trainflow.published_digest"] = published.content_digest
    records: list[tuple[str, Mapping[str, str], Mapping[str, str]]] = [("MLflow run", found.tags, expected)]
    for version in found.versions:
        # A version without a digest is not the model of this chain.
        own = {DIGEST_TAG: ""} | version["tags"]
        digest = {} if found.digest is None else {DIGEST_TAG: found.digest}
        records.append((f"{version['name']} version {version['version']}", own, {**keys, **digest}))
    for link, tags, wanted in records:
        for name, value in wanted.items():
            if tags.get(name) not in (None, value):
                yield link, f"tag {name}: {tags[name][:_SHORT]}, the lineage has {value[:_SHORT]}"


def _find_run(client: Any, chain: Chain) -> Any:
    lineage = chain.lineage
    run_id = lineage.mlflow_run_id
    if run_id is None and chain.storage is not None:
        run_id = find_run_id(chain.storage, lineage.tracked_run)
    if run_id is not None:
        with contextlib.suppress(GoneError):
            return client.get_run(run_id)
        return None
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    query = f"tags.`{TOKEN_TAG}` = '{lineage.tracked_run}'"
    found = client.search_runs(experiments, query, max_results=1)
    return found[0] if found else None


def _versions(client: Any, digest: str | None, run: Any) -> Iterator[dict[str, Any]]:
    """The versions that the run registered, and those of the same model."""
    for version in list_versions(client):
        if version["run_id"] == run.info.run_id or (digest is not None and version["digest"] == digest):
            shown = {key: value for key, value in version["tags"].items() if key.startswith(_TAG)}
            yield {"name": version["name"], "version": version["version"], "aliases": version["aliases"], "tags": shown}
