"""From an address to a model's description and the folders of its files.

An address is one of these::

    <storage>/runs/<run>                                       the model of that run
    <storage>/stages/train/<key>, or model below it            the model that this stage trained
    <storage>/stages/train/<key>/checkpoints/checkpoint-<n>    its weights at that optimizer step
    <storage>/hub/<name>, or a revision below it               a publication in a folder; its newest revision
    hf://organisation/name[@revision]                          a publication on the Hugging Face Hub
    models:/name@alias, models:/name/3, models:/m-1a2b…        a model in MLflow, at MLFLOW_TRACKING_URI
    any folder with a trainflow_model.json                     a copy of one of these
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from trainer_lib.errors import ConfigError, DamagedError, StorageError
from trainer_lib.hub.base import parse_target
from trainer_lib.hub.folder import FolderHub
from trainer_lib.hub.huggingface import download_snapshot
from trainer_lib.model_folder.description import FILE, LIMIT, SOURCE, ModelDescription, Places, read_description
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, Commit, content_digest, read_commit
from trainer_lib.trackers.mlflow.mlflow_models import download_model
from trainer_lib.trackers.spool import user_data_dir

FIELD = "model"
PIN = "pinned.json"
"""Beside the description of a model that MLflow has: the digest that the model had when it was logged."""
_RUN_FILE = "run.json"
_RUNS = "runs"
_TRAINED = re.compile(r"\.\./\.\./stages/train/[0-9a-f]+/model")  # the weights' path in a run's description
_INSIDE = re.compile(r"(/stages/[^/]+/[^/]+)/(model|checkpoints|predictions(/[^/]+)?)$|(/runs/[^/]+)/report\.html$")
"""Contents of a stage or a run that are shown with their own address."""


@dataclass(frozen=True)
class FoundModel:
    """A description and where its files are."""

    description: ModelDescription
    url: str  # the address of the description's folder
    # weights, code, data: the folders of the files.
    weights: Store
    code: Store
    data: Store
    # Name of the checkpoint below `checkpoints` whose weights are wanted; None: the exported ones.
    checkpoint: str | None = None
    # Whether the address is a run of a storage on which this user has run pipelines, whose committed train stage has
    # this model: its code is what that run executed. A published folder never is, whatever it holds.
    is_run: bool = False
    registered: str | None = None  # the address in MLflow of which `url` is a copy that goes with this process

    @property
    def checkpoints(self) -> Store:
        """The folder of the checkpoints, next to the exported model: <stage>/model and <stage>/checkpoints."""
        return Store.open(self.weights.url.rpartition("/")[0]).child("checkpoints")

    def digest(self) -> str:
        """SHA-256 of all that decides the predictions: code, settings, weights, assets and facts of the data."""
        described, weights = self.description, content_digest(self.description.weights)
        if self.checkpoint is not None:
            commit = read_commit(self.checkpoints.child(self.checkpoint), kind="checkpoint")
            if commit is None:
                raise DamagedError("The checkpoint is not complete.", field=FIELD, value=self.checkpoint)
            weights = commit.content_digest
        return model_digest(described, weights)


def model_digest(model: ModelDescription, weights: str) -> str:
    """SHA-256 of all that decides a model's predictions; `weights`: the content digest of its weights."""
    decides = [model.code_digest, weights, content_digest(model.assets), model.info, model.rows, model.columns]
    return hashlib.sha256(json.dumps(decides, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def require_weights(found: FoundModel) -> None:
    """Refuse a model whose files were removed: a description can outlive them, as a LoggedModel of MLflow does."""
    folder = found.weights if found.checkpoint is None else found.checkpoints.child(found.checkpoint)
    if not folder.children():
        what = "The weights of this model are not in the storage any more."
        remedy = (
            "Run its pipeline again, or restore the folder. trainflow gc keeps what is registered, and runs with a tag"
        )
        raise DamagedError(what, field=FIELD, value=folder.url, remedy=f"{remedy} (trainflow tag RUN).")


def require_trust(found: FoundModel, trust: bool | str) -> None:
    """Refuse to execute a model's code that is not trusted; `trust` may be the SHA-256 of the code that is."""
    digest = found.description.code_digest
    if isinstance(trust, str):
        if trust.removeprefix("sha256:") != digest:
            what = f"The model has other code than the code that you trust: its SHA-256 is {digest}."
            remedy = f"Read {found.code.url} before you trust it."
            raise ConfigError(what, field="trust_code", value=trust, remedy=remedy)
    elif not trust and not found.is_run:
        files = ", ".join(entry.path for entry in found.description.code[:4])
        # The copy of a model of MLflow is removed when this process ends.
        place = found.code.url
        if found.registered is not None:
            place = f"it (mlflow artifacts download --artifact-uri {found.registered})"
        what = f"Loading this model executes its code ({files}; SHA-256 {digest}), which is not trusted."
        remedy = f'Read {place}, then pass trust_code="{digest}"; to trainflow predict, --trust {digest}.'
        raise ConfigError(what, field="trust_code", remedy=remedy)


def find_model(address: str) -> FoundModel:
    """The model at an address. Raises ConfigError where none can be loaded, and DamagedError for its description."""
    if address.startswith("hf://"):
        target = parse_target(address, field=FIELD)
        return _read_published(Store.open(download_snapshot(target.repo or address, revision=target.revision)), address)
    if address.startswith("models:/"):
        return replace(_read(Store.open(download_model(address)), address), registered=address)
    store = open_link(address, field=FIELD)
    if store.exists(FILE):
        found = _read(store, address)
        return replace(found, is_run=_is_run(store, found))
    commit = read_commit(store)
    if commit is not None and commit.kind == "stage":
        return _find_in_runs(store, commit)
    if commit is not None and commit.kind == "checkpoint":
        name, stage = store.url.rstrip("/").rpartition("/")[2], _go(store, "../..")
        found = _find_in_runs(stage, read_commit(stage))
        return replace(found, checkpoint=name)
    if store.exists(_RUN_FILE):
        what = "This run has trained no model yet, or an older version of trainflow recorded it."
        remedy = "Name a run that has (trainflow runs lists them), or run its pipeline to the end of the training."
        raise ConfigError(what, field=FIELD, value=address, remedy=remedy)
    newest = FolderHub(address, field=FIELD).newest()
    if newest is not None:
        return _read_published(newest.store, address)
    what = f"There is no model: neither a {FILE}, nor a run, a train stage, a checkpoint or a publication."
    remedy = "Give <storage>/runs/<run>, <storage>/stages/train/<key>, <storage>/hub/<name> or hf://organisation/name."
    raise ConfigError(what, field=FIELD, value=address, remedy=remedy)


def open_link(address: str, *, field: str) -> Store:
    """The folder of a run, a stage, a checkpoint or a publication that an address means, also from inside of it.

    Commands show such addresses: of a stage its model or its predictions, of a run its report. `field` is for errors.
    """
    store = Store.open(address, field=field)
    outer = Store.open(_INSIDE.sub(r"\1\4", store.url.rstrip("/")), field=field)
    return outer if outer.exists(COMMIT) or outer.exists(_RUN_FILE) else store


def _read_published(store: Store, address: str) -> FoundModel:
    """The model of a publication, whose files all lie below it."""
    found = _read(store, address)
    if found.description.places != Places():
        raise DamagedError("A publication's description names other folders than its own.", field=store.url)
    return found


def _read(store: Store, address: str) -> FoundModel:
    """The model described in this very folder."""
    data = store.read_if_exists(FILE, limit=LIMIT)
    if data is None:
        what = f"The folder has no {FILE}, so it was not published by trainflow."
        remedy = "A transformers model loads with from_pretrained."
        raise ConfigError(what, field=FIELD, value=address, remedy=remedy)
    description = read_description(data, f"{store.url}/{FILE}")
    places = description.places
    return FoundModel(
        description,
        store.url,
        weights=_go(store, places.weights),
        code=_go(store, places.code),
        data=_go(store, places.data),
        checkpoint=places.checkpoint,
    )


def _is_run(store: Store, found: FoundModel) -> bool:
    """Whether a description lies in ``<storage>/runs/<run>``, leads to its train stage, and the storage is trusted."""
    parts = store.url.rstrip("/").split("/")
    key = found.description.stages.get("train", "")
    places = found.description.places
    if parts[-2:-1] != [_RUNS] or places.code != SOURCE or not _TRAINED.fullmatch(places.weights):
        return False
    if not store.exists(_RUN_FILE) or not _note(_go(store, "../..").url)[0].is_file():
        return False
    commit = read_commit(_go(found.weights, ".."))
    return commit is not None and commit.kind == "stage" and commit.meta.get("key") == key


def _find_in_runs(stage: Store, commit: Commit | None) -> FoundModel:
    """The model of a train stage, from the newest run that used it."""
    name = None if commit is None else commit.meta.get("stage")
    if commit is None or name != "train":
        what = "This folder is not the result of a train stage." if name is None else f"This is the result of {name}."
        remedy = "Give the folder of the train stage, or that of the run."
        raise ConfigError(what, field=FIELD, value=stage.url, remedy=remedy)
    runs = _go(stage, "../../..").child(_RUNS)
    newest: FoundModel | None = None
    for run in map(runs.child, runs.children()):
        # Another run's description does not matter here.
        with contextlib.suppress(ConfigError, StorageError):
            if run.exists(FILE):
                model = _read(run, stage.url)
                if model.description.stages.get("train") == str(commit.meta.get("key")):
                    newest = replace(model, is_run=_is_run(run, model))
    if newest is not None:
        return newest
    what = "No run on this storage describes the model of this stage, so its recipe is not known."
    remedy = "Run its pipeline again: what is committed is kept, and the model is described."
    raise ConfigError(what, field=FIELD, value=stage.url, remedy=remedy)


def _go(store: Store, path: str) -> Store:
    """The folder at a URL, or at a relative path, in which `..` leads upwards."""
    if "://" in path or path.startswith("/"):
        return Store.open(path, field=FIELD)
    url = store.url.rstrip("/")
    for part in path.split("/"):
        if part == "..":
            url = url.rpartition("/")[0]
        elif part not in ("", "."):
            url = f"{url}/{part}"
    return Store.open(url, field=FIELD)


# -- the storages on which this user has run pipelines: only there a run's code is executed without a question --------
# Noted in the user's own folder: what a storage says of itself, a stranger may have written.
def trust_storage(url: str) -> None:
    """Note that this user runs pipelines on a storage; without a place for notes, there will be a question."""
    note, address = _note(url)
    with contextlib.suppress(OSError):
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_text(f"{address}\n", encoding="utf-8")


def _note(url: str) -> tuple[Path, str]:
    address = url.rstrip("/") if "://" in url else str(Path(url).resolve())
    return user_data_dir() / "storages" / hashlib.sha256(address.encode()).hexdigest()[:32], address
