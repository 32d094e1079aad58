"""Predictions of new rows by a trained model: a folder that is whole once its COMMIT.json is there.

    <to>/key.json         what decides the predictions: model, rows, settings
    <to>/predictions/     part-00000.parquet (or .jsonl) and so on: each a fixed range of the rows
    <to>/records/         which parts are finished, for a run that continues
    <to>/claims/          which worker is working on which part (`locks.shared_parts`)
    <to>/COMMIT.json      written last: every part with its SHA-256

Neither prefect nor torch is imported here: the model is loaded by a worker.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import counted
from trainer_lib.data.rows.columns import ROW_ID
from trainer_lib.data.rows.parts import FOLDER, RECORDS, NumberedParts, numbered_parts
from trainer_lib.data.rows.row_files import read_rows
from trainer_lib.data.rows.row_sources import FIELD, RowFile, find_row_files
from trainer_lib.errors import ConfigError, DamagedError, DataError
from trainer_lib.launch.pool import launch_workers
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.launch.settings.gpu_selection import list_visible, num_cores
from trainer_lib.locks.lease import Lease, acquire_lease
from trainer_lib.locks.shared_parts import CLAIMS
from trainer_lib.model_folder.locate import FoundModel, find_model, require_trust
from trainer_lib.protocol.requests import RowSettings, ScoreRequest
from trainer_lib.recipes.tables.table_files import TableForm
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import COMMIT, read_commit, verify_files, write_commit
from trainflow.tasks.keys.keys import StageKey, stage_key, versions
from trainflow.tasks.keys.sources import fingerprints
from trainflow.tasks.stage.facts import StageFacts
from trainflow.tasks.stage.manifest import (
    KEY_FILE,
    StageManifest,
    belongs_to_other_key,
    commit_facts,
    compare_keys,
    read_key,
    summary,
)

STAGE = "predict-rows"
FORMATS = ("parquet", "jsonl")
_KEY_BYTES = 16 << 20
_OURS = {KEY_FILE, "lease", RECORDS, CLAIMS, FOLDER, COMMIT, "sources.json"}


@dataclass(frozen=True)
class NewRowsFacts(StageFacts, stage=STAGE):
    """The number of rows, the column with their ids (None: they are numbered), and how many rows are bad."""

    rows: int
    id_column: str | None = None
    errors: int = 0


@dataclass(frozen=True, kw_only=True)
class NewRows(RowSettings):
    """A prediction that was asked for."""

    model: str  # address of the model
    data: Sequence[str]  # paths, URLs, folders and patterns of the files with the rows
    to: str | None = None  # folder or URL of the predictions; None: `predictions/<key>` in the working directory
    trust: bool | str = False  # SHA-256 of the model's code that was read; True: trust whatever code it has


@dataclass(frozen=True)
class RowsJob:
    """New rows, looked at: the model is located and trusted, the files are there.

    The predictions go to `url`; the `key` has everything that decides them.
    """

    asked: NewRows
    model: FoundModel
    files: tuple[RowFile, ...]
    key: StageKey
    url: str

    @classmethod
    def of(cls, asked: NewRows) -> RowsJob:
        """Look at everything that can be refused before a worker starts."""
        if asked.file_format not in FORMATS:
            remedy = f"Use {' or '.join(FORMATS)}."
            raise ConfigError("There is no such format.", field="--format", value=asked.file_format, remedy=remedy)
        model = find_model(asked.model)
        require_trust(model, asked.trust)
        files = tuple(find_row_files(asked.data))
        to = None if asked.to is None else Store.open(asked.to, field="--to")
        # Remembered next to the predictions: a run that continues does not read all rows for their digest again.
        memory = to.local_path("sources.json") if to is not None and to.is_local else None
        sources = fingerprints([file.address for file in files], memory=memory, field=FIELD)
        decisive = {
            "model": model.digest(),
            "rows": sources,
            "id_column": asked.id_column,
            "ignored": sorted(asked.ignored),
            "format": asked.file_format,
            "rows_per_file": asked.rows_per_file,
            "batch_size": asked.batch_size,
            # Not the limit: with a greater one, finished parts are the same.
            **({"sort_by": asked.sort_by} if asked.sort_by is not None else {}),
            **({"errors": "column"} if asked.max_errors else {}),
            "versions": versions(),
        }
        key = stage_key(STAGE, decisive)
        url = to.url if to is not None else Store.open(f"{FOLDER}/{key.folder}").url
        return cls(asked, model, files, key, url)

    @property
    def store(self) -> Store:
        """The folder of the predictions."""
        return Store.open(self.url, field="--to")

    @property
    def answer(self) -> str | None:
        """The column that the model predicts, where its recipe knows files of rows by their columns; None elsewhere."""
        name = self.model.description.info.get("label")
        return name if isinstance(name, str) and name not in self.model.description.columns else None

    def find_unused(self) -> list[str]:
        """The columns of the first row that predictions leave aside: what is predicted, and what training left out."""
        form, first = TableForm.of(self.model.description.info), None
        with contextlib.suppress(DataError):  # the worker names a bad row, or counts it
            _, first = next(read_rows(self.files, None, form.reading if form else None), ("", None))
        named = {*self.asked.ignored, self.asked.id_column, form.id_column if form else None, ROW_ID, "id"}
        names = [str(name) for name in first if name not in named] if isinstance(first, Mapping) else []
        return [name for name in names if name == self.answer or (form is not None and form.drops(name))]

    def request(self) -> ScoreRequest:
        """The request for a worker."""
        settings: dict[str, Any] = {member.name: getattr(self.asked, member.name) for member in fields(RowSettings)}
        if self.answer is not None and self.answer != self.asked.id_column:
            settings["ignored"] += (self.answer,)
        return ScoreRequest(
            output=self.url,
            model=self.asked.model,
            digest=str(self.key.fields["model"]),
            code=self.model.description.code_digest,
            sources=self.files,
            key=self.key.digest,
            is_on_cpu=self.is_on_cpu,
            **settings,
        )

    @property
    def is_on_cpu(self) -> bool:
        """Whether the model was trained on the CPU although there are devices."""
        return bool(self.model.description.args.get("use_cpu"))

    def parts(self) -> NumberedParts:
        """The files of the predictions."""
        return numbered_parts(self.store, self.key.digest, self.asked.file_format)

    def workers(self, count: int, threads: int | None) -> list[LaunchConfig]:
        """The launches of so many workers, with one GPU or a share of the cores. Raises ConfigError."""
        gpus = [] if self.is_on_cpu else list_visible(os.environ)
        if gpus and count > len(gpus):
            what = f"This machine offers {counted(len(gpus), 'CUDA device')}, and each worker needs its own."
            remedy = f"Use at most {len(gpus)}, or run the same command on other machines too."
            raise ConfigError(what, field="--workers", value=count, remedy=remedy)
        config = LaunchConfig(kind="process", processes=1, threads=threads)
        if count == 1:
            return [config]
        if gpus:
            return [replace(config, devices=(gpu,)) for gpu in gpus[:count]]
        return [replace(config, threads=threads or max(1, num_cores() // count))] * count


def predict_new_rows(
    job: RowsJob,
    *,
    on_line: Callable[[str], None],  # called with what the workers print
    on_event: Callable[[dict[str, Any]], None],  # called with what they report
    workers: Sequence[LaunchConfig] = (LaunchConfig(kind="process", processes=1),),
) -> tuple[StageManifest[NewRowsFacts], bool]:
    """Predict the rows, unless that is done; return the manifest, and whether the predictions were there already.

    What an earlier run finished is kept. Where another process predicts these rows already, on this machine or another
    one, our workers take parts as its own do; one of the two commits.

    Raises:
        ConfigError: the folder holds other things. DataError: more rows are bad than allowed. TrainflowError: the typed
            failure of a worker that would meet every other, or that of the last one when all were lost.
    """
    store = job.store
    if (done := _find_done(job)) is not None:
        return done, True
    store.ensure_writable(field="--to")

    def run() -> None:
        launch_workers(job.request(), workers, env={}, on_line=on_line, on_event=on_event, what="predict")

    lease = _acquire(job, run, on_line)
    with lease or contextlib.nullcontext():
        if (done := _find_done(job)) is not None:  # while we waited
            return done, True
        if lease is None:
            raise DamagedError("The predictions that another process committed are gone.", field=store.url)
        if belongs_to_other_key(store, job.key):
            store.delete_tree(FOLDER)  # of another job: nothing of it was finished
        job.parts().forget_damaged()
        store.write_bytes(KEY_FILE, job.key.to_json())
        run()
        return _commit(job, lease), False


def _acquire(job: RowsJob, run: Callable[[], None], on_line: Callable[[str], None]) -> Lease | None:
    """Acquire the folder; None once another process has committed. While that one holds it, our workers help."""
    store = job.store
    if (lease := acquire_lease(store, wait=lambda: True)) is not None:  # True at once: nothing is waited for
        return lease
    if (read_key(store) or {}).get("key") == job.key.digest:
        on_line("Another process predicts these rows: this one takes parts as well.")
        run()
    return acquire_lease(
        store,
        wait=lambda: store.exists(COMMIT),
        on_wait=lambda holder: on_line(f"Waits for the process that commits these rows: {holder}"),
    )


def _commit(job: RowsJob, lease: Lease) -> StageManifest[NewRowsFacts]:
    store = job.store
    entries: list[FileEntry] = []
    rows = errors = 0
    first, id_column = "", None
    for files, notes in job.parts().collect():
        entries += files
        rows, errors, id_column = rows + int(notes["rows"]), errors + int(notes["errors"]), notes["id_column"]
        first = first or notes.get("first_error", "")
    if errors > (limit := job.asked.max_errors):
        what = f"{counted(errors, 'row')} cannot be predicted, {limit:,} may be bad. The first: {first}"
        remedy = "Mend the rows, or raise the limit: what is finished is kept."
        raise DataError(what, field="--max-errors", value=limit, remedy=remedy)
    facts = NewRowsFacts(rows, id_column, errors)
    meta = {"stage": STAGE, "key": job.key.digest, "metrics": {}, "meta": commit_facts(facts, "", 1, 0)}
    commit = write_commit(store, "stage", entries, meta, guard=lease.ensure_held)
    store.delete_tree(CLAIMS)
    return StageManifest.from_commit(store.url, commit)


def _find_done(job: RowsJob) -> StageManifest[NewRowsFacts] | None:
    """The intact predictions of this very job; a damaged commit is taken back, so that its parts are looked at."""
    store = job.store
    _require_ours(job, store)
    commit = read_commit(store, kind="stage")
    if commit is None:
        return None
    if verify_files(store, commit):
        store.delete(COMMIT)
        return None
    return StageManifest.from_commit(store.url, commit).with_facts(NewRowsFacts)


def _require_ours(job: RowsJob, store: Store) -> None:
    """Raise ConfigError unless the folder is empty, or holds what an earlier run of this job left.

    What another job began without finishing a part does not count: its rows, mended, are another job.
    """
    if foreign := [name for name in store.children() if name not in _OURS]:
        shown = f"{store.url} ({', '.join(foreign[:3])})"
        raise ConfigError("The folder holds other files.", field="--to", value=shown, remedy="Give an empty folder.")
    data = store.read_if_exists(KEY_FILE, limit=_KEY_BYTES)
    try:
        record = parse_json(data) if data else {"key": job.key.digest}
        is_other = record["key"] != job.key.digest
        changed = compare_keys(record, job.key) if is_other else []
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError("The record of the predictions is damaged.", field=f"{store.url}/{KEY_FILE}") from error
    if is_other and (store.exists(COMMIT) or job.parts().is_any_finished()):
        what = f"The folder holds predictions that differ from these: {summary(changed)}."
        raise ConfigError(what, field="--to", value=store.url, remedy="Give another folder, or remove this one.")
