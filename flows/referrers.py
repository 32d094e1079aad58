"""What refers to the results on a storage: runs, tags, publications, versions in MLflow's registry.

A run refers to the folders that its record names: those of its results, and those that it worked in. A publication that
is still there refers to the results that it was made from. A registered version refers to the run that logged it, and
to the folder that its source names.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from flows.past_runs import PastRun
from flows.stages import stage_names
from tasks.configs import TrackingConfig
from tasks.stage.facts import PublishFacts
from tasks.stage.keys import FOLDER_CHARS
from tasks.stage.manifest import STAGES, StageManifest, read_key_fields
from tasks.tracking import default_tracking_uri, tracking_uri
from trainer_lib.commit import COMMIT, read_commit
from trainer_lib.errors import DamagedError, InfrastructureError, StorageError, first_line
from trainer_lib.secrets import MASK, mask
from trainer_lib.storage import Store

PUBLISH = "push-to-hub"
_TAG = "trainflow."
_SQLITE = "sqlite:///"

Folder = tuple[str, str]
"""A stage's name, and the name of one folder of it."""


@dataclass(frozen=True)
class Referrer:
    """Something outside of the runs' records that refers to results.

    Attributes:
        what: in words ("published as …").
        folders: the stages' folders that it names.
        mlflow_run_id: the MLflow run that it names; empty: none.
    """

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
    root = Store.open(storage)
    stages = root.child(STAGES, PUBLISH)
    found = (_read_publication(storage, stages.child(name)) for name in stages.children())
    return [each for each in found if each is not None]


def _read_publication(storage: str, store: Store) -> Referrer | None:
    try:
        commit = read_commit(store, kind="stage")
        manifest = None if commit is None else StageManifest.from_commit(store.url, commit)
    except DamagedError:
        return None
    if manifest is None or not isinstance(manifest.facts, PublishFacts) or not _is_there(manifest.facts):
        return None
    inputs = (read_key_fields(storage, PUBLISH, manifest.key) or {}).get("stage_keys")
    keys = {**(inputs if isinstance(inputs, dict) else {}), PUBLISH: manifest.key}
    folders = frozenset((stage, str(key)[:FOLDER_CHARS]) for stage, key in keys.items())
    return Referrer(f"published as {mask(manifest.facts.published_url)}", folders)


def _is_there(facts: PublishFacts) -> bool:
    if urlsplit(facts.published_url).scheme in ("hf", "http", "https"):
        return True  # only its hub could say, and what is published must not depend on an answer
    try:
        return Store.open(facts.published_url).exists(COMMIT)
    except StorageError:
        return True


# -- MLflow's registry ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registry:
    """The registries that may hold models of a storage: those of its runs, and that of the spec.

    Attributes:
        uris: tracking URIs, with credentials where the environment has them.
        missing: databases that runs were recorded in and that are not there.
    """

    storage: str
    uris: tuple[str, ...]
    missing: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, storage: str, runs: Iterable[PastRun], config: TrackingConfig) -> Registry:
        """The registries of these runs."""
        root = Store.open(storage)
        own = tracking_uri(config, root)
        recorded = {str(run.record.get("tracking_uri")) for run in runs if run.mlflow_run_id}
        uris, missing = {own}, set()
        for uri in recorded - {mask(own)}:
            if _database(uri) is None or _is_file(uri):
                uris.add(uri)
            # A storage that was moved or copied has its database beside it.
            elif not _is_file(default_tracking_uri(root)):
                missing.add(uri)
        return cls(storage, tuple(sorted(uris)), tuple(sorted(missing)))

    def find_versions(self) -> list[Referrer]:
        """The registered versions, and what each refers to.

        Raises:
            InfrastructureError: a registry cannot be asked.
        """
        if self.missing:
            raise _unreachable(self.missing[0], "its database is not there")
        return [referrer for uri in self.uris for referrer in self._versions_of(uri)]

    def _versions_of(self, uri: str) -> Iterator[Referrer]:
        if MASK in uri:
            raise _unreachable(uri, "its credentials are not in the environment")
        if _database(uri) is not None and not _has_versions(uri):
            return  # without importing mlflow, which takes seconds
        from trainer_lib.trackers.mlflow_client import connect
        from trainer_lib.trackers.model_versions import list_model_versions

        try:
            versions = list_model_versions(connect(uri))
        except Exception as error:  # whatever mlflow raises
            raise _unreachable(uri, first_line(error)) from error
        for each in versions:
            folders = {*self._folder_of(each.source), *_folders_of_tags(each.tags)}
            yield Referrer(f"registered as {each.name} version {each.version}", frozenset(folders), each.run_id)

    def _folder_of(self, source: str) -> set[Folder]:
        """The stage's folder that a version's source lies in."""
        text = unquote(urlsplit(source).path) if source.startswith("file://") else source
        root = Store.open(self.storage)
        for place in {root.url, unquote(urlsplit(root.url).path) if root.is_local else root.url}:
            below = text.removeprefix(f"{place.rstrip('/')}/{STAGES}/")
            parts = below.split("/")
            if below != text and len(parts) > 1:
                return {(parts[0], parts[1])}
        return set()


def _folders_of_tags(tags: Mapping[str, Any]) -> set[Folder]:
    named = {name: str(tags.get(f"{_TAG}{name}") or "") for name in stage_names()}
    return {(name, key[:FOLDER_CHARS]) for name, key in named.items() if key}


def _database(uri: str) -> Path | None:
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def _is_file(uri: str) -> bool:
    path = _database(uri)
    return path is not None and path.is_file()


def _has_versions(uri: str) -> bool:
    """Whether a database has any version; True where that cannot be seen without mlflow."""
    path = _database(uri)
    if path is None or not path.is_file():
        return path is None
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        return database.execute("SELECT 1 FROM model_versions LIMIT 1").fetchone() is not None
    return True


def _unreachable(uri: str, why: str) -> InfrastructureError:
    return InfrastructureError(
        f"MLflow's registry cannot be asked which models are registered, so nothing is removed: {why}.",
        field="tracking",
        value=mask(uri),
        remedy="Try again when it answers; --skip-registry removes without asking it.",
    )


def collect_folders(runs: Iterable[PastRun], others: Sequence[Referrer]) -> dict[Folder, str]:
    """Every folder that something refers to, and what does."""
    found = {folder: each.what for each in others for folder in each.folders}
    return found | {folder: f"run {run.id}" for run in runs for folder in folders_of(run)}
