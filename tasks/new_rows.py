"""Predictions of new rows by a trained model: a folder that is whole once its COMMIT.json is there.

    <to>/key.json         what decides the predictions: model, rows, settings
    <to>/predictions/     part-00000.parquet (or .jsonl) and so on: each a fixed range of the rows
    <to>/records/         which parts are finished, for a run that continues
    <to>/COMMIT.json      written last: every part with its SHA-256

Neither prefect nor torch is imported here: the model is loaded by a worker.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.stage.facts import StageFacts
from tasks.stage.keys import StageKey, stage_key, versions
from tasks.stage.manifest import KEY_FILE, StageManifest, commit_facts, compare_keys, summary
from tasks.stage.sources import fingerprints
from trainer_lib.commit import COMMIT, read_commit, verify_files, write_commit
from trainer_lib.data.row_sources import FIELD, RowFile, find_row_files
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.launch import LaunchConfig, launch
from trainer_lib.locks.lease import acquire_lease
from trainer_lib.model_folder.locate import FoundModel, find_model, require_trust
from trainer_lib.requests import ScoreRequest
from trainer_lib.storage import Store

STAGE = "predict-rows"
FORMATS = ("parquet", "jsonl")
FOLDER = "predictions"
RECORDS = "records"
_KEY_BYTES = 16 << 20
_OURS = {KEY_FILE, "lease", RECORDS, FOLDER, COMMIT, "sources.json"}


@dataclass(frozen=True)
class NewRowsFacts(StageFacts, stage=STAGE):
    """The number of predicted rows, and the column with their ids; None: they are numbered."""

    rows: int
    id_column: str | None = None


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """What is to be predicted, and how.

    Attributes:
        model: address of the model.
        data: paths, URLs, folders and patterns of the files with the rows.
        to: folder or URL of the predictions; None: `predictions/<key>` in the working directory.
        trust: SHA-256 of the model's code that was read; True: trust whatever code it has.
        id_column: column with the ids of the rows; None: `row_id` or `id`, else they are numbered.
        ignored: columns that are not for the model.
        format: "parquet" or "jsonl".
        rows_per_file: rows per file.
        batch_size: rows of a forward pass; None: as while training.
    """

    model: str
    data: Sequence[str]
    to: str | None = None
    trust: bool | str = False
    id_column: str | None = None
    ignored: Sequence[str] = ()
    format: str = "parquet"
    rows_per_file: int = 10_000
    batch_size: int | None = None


@dataclass(frozen=True)
class RowsJob:
    """New rows, looked at: the model is found and trusted, the files are there.

    Attributes:
        url: where the predictions go.
        key: everything that decides them.
    """

    asked: NewRows
    model: FoundModel
    files: tuple[RowFile, ...]
    key: StageKey
    url: str

    @classmethod
    def of(cls, asked: NewRows) -> RowsJob:
        """Look at everything that can be refused before a worker starts.

        Raises:
            ConfigError: there is no such model, its code is not trusted, there are no rows, or the folder holds other
                things. StorageError: a store cannot be read.
        """
        if asked.format not in FORMATS:
            raise ConfigError(
                "There is no such format.", field="--format", value=asked.format, remedy=f"Use {' or '.join(FORMATS)}."
            )
        model = find_model(asked.model)
        require_trust(model, asked.trust)
        files = tuple(find_row_files(asked.data))
        to = None if asked.to is None else Store.open(asked.to, field="--to")
        # Remembered beside the predictions: a run that continues does not read all rows for their digest again.
        memory = to.local_path("sources.json") if to is not None and to.is_local else None
        sources = fingerprints([file.address for file in files], memory=memory, field=FIELD)
        fields = {
            "model": model.digest(),
            "rows": sources,
            "id_column": asked.id_column,
            "ignored": sorted(asked.ignored),
            "format": asked.format,
            "rows_per_file": asked.rows_per_file,
            "batch_size": asked.batch_size,
            "versions": versions(),
        }
        key = stage_key(STAGE, fields)
        url = to.url if to is not None else Store.open(f"{FOLDER}/{key.folder}").url
        return cls(asked, model, files, key, url)

    @property
    def store(self) -> Store:
        """The folder of the predictions."""
        return Store.open(self.url, field="--to")

    def request(self) -> ScoreRequest:
        """What the worker is asked for."""
        asked, description = self.asked, self.model.description
        return ScoreRequest(
            output=self.url,
            model=asked.model,
            digest=str(self.key.fields["model"]),
            code=description.code_digest,
            sources=self.files,
            key=self.key.digest,
            id_column=asked.id_column,
            ignored=tuple(asked.ignored),
            rows_per_file=asked.rows_per_file,
            file_format=asked.format,
            batch_size=asked.batch_size,
            is_on_cpu=bool(description.args.get("use_cpu")),
        )


def predict_new_rows(
    job: RowsJob,
    *,
    on_line: Callable[[str], None],
    on_event: Callable[[dict[str, Any]], None],
    config: LaunchConfig | None = None,
) -> tuple[StageManifest[NewRowsFacts], bool]:
    """Predict the rows, unless that is done; what an earlier run finished is kept.

    Args:
        job: what is to be done.
        on_line, on_event: called with what the worker prints and reports.
        config: how the worker is started; None: a process of its own.

    Returns:
        The manifest, and whether the predictions were there already.

    Raises:
        ConfigError: the folder holds other things. TrainflowError: the typed failure of the worker.
    """
    store = job.store
    if (done := _find_done(job)) is not None:
        return done, True
    store.ensure_writable(field="--to")
    lease = acquire_lease(
        store,
        wait=lambda: store.exists(COMMIT),
        on_wait=lambda holder: on_line(f"Another process predicts these rows: {holder}"),
    )
    with lease or contextlib.nullcontext():
        if (done := _find_done(job)) is not None:  # while we waited
            return done, True
        if lease is None:
            raise DamagedError("The predictions that another process committed are gone.", field=store.url)
        if _key_of(store) not in (None, job.key.digest):
            store.delete_tree(FOLDER)  # of another job: nothing of it was finished
        store.write_bytes(KEY_FILE, job.key.to_json())
        how = config or LaunchConfig(kind="process", processes=1)
        result = launch(job.request(), how, env={}, on_line=on_line, on_event=on_event, what="predict")
        facts = commit_facts(NewRowsFacts(result.rows, result.id_column), "", 1, 0)
        meta = {"stage": STAGE, "key": job.key.digest, "metrics": {}, "meta": facts}
        commit = write_commit(store, "stage", result.files, meta, guard=lease.ensure_held)
    return StageManifest.from_commit(store.url, commit), False


def _find_done(job: RowsJob) -> StageManifest[NewRowsFacts] | None:
    """The intact predictions of this very job; a damaged commit is taken back, so that its parts are looked at.

    Raises:
        ConfigError: the folder holds the predictions of another job, or other things.
    """
    store = job.store
    _require_ours(job, store)
    commit = read_commit(store, kind="stage")
    if commit is None:
        return None
    if verify_files(store, commit):
        store.delete(COMMIT)
        return None
    return StageManifest.from_commit(store.url, commit).with_facts(NewRowsFacts)


def _key_of(store: Store) -> str | None:
    data = store.read_if_exists(KEY_FILE, limit=_KEY_BYTES)
    return None if data is None else str(json.loads(data)["key"])


def _require_ours(job: RowsJob, store: Store) -> None:
    """Raise ConfigError unless the folder is empty, or holds what an earlier run of this job left.

    What another job began without finishing a part does not count: its rows, mended, are another job.
    """
    if foreign := [name for name in store.children() if name not in _OURS]:
        raise ConfigError(
            "The folder holds other files.",
            field="--to",
            value=f"{store.url} ({', '.join(foreign[:3])})",
            remedy="Give an empty folder.",
        )
    data = store.read_if_exists(KEY_FILE, limit=_KEY_BYTES)
    try:
        record = json.loads(data) if data else {"key": job.key.digest}
        is_other = record["key"] != job.key.digest
        changed = compare_keys(record, job.key) if is_other else []
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError("The record of the predictions is damaged.", field=f"{store.url}/{KEY_FILE}") from error
    if is_other and (store.exists(COMMIT) or any(True for _ in store.child(RECORDS).list())):
        raise ConfigError(
            f"The folder holds predictions that differ from these: {summary(changed)}.",
            field="--to",
            value=store.url,
            remedy="Give another folder, or remove this one.",
        )
