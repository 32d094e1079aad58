"""The runs that are recorded on a storage: which there are, how far they came, and the one that an id means.

    <storage>/runs/<id>/run.json        written by `trainflow.flows.reports.run_record`, again as stages end
    <storage>/runs/<id>/tags/<name>     a name that a person gave it (`trainflow tag`)

The id is the first 16 hex digits of the pipeline's key: repeating a command with the same spec and recipe continues
the same run.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from types import NoneType
from typing import Any, NoReturn

from trainer_lib.base.json_text import BrokenSealError, parse_record, parse_sealed, render_sealed
from trainer_lib.base.suggestions import nearest, to_cell, to_terminal
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.locks.removal import await_removal
from trainer_lib.storage import Store
from trainflow.tasks.keys.keys import Difference, StageKey
from trainflow.tasks.stage.manifest import StageManifest, compare_keys, look_up_under

RUNS = "runs"
RUN_FILE = "run.json"
KEYS_FILE = "keys.json"
SPEC_FILE = "spec.yaml"
ARGUMENTS_FILE = "arguments.json"
TAGS = "tags"
NEWEST = "last"
"""In place of an id: the run that was started last, of those that have what the command needs."""
_RUN_FILE_BYTES = 16 << 20
_KEYS_BYTES = 64 << 20
_SHORTEST = 4  # characters that the beginning of an id must have to stand for it
_LISTED = 5
_AT_ONCE = 16  # records that are read at the same time from a store that is not a disk
_log = logging.getLogger(__name__)
# Of a record's fields: what they are, and what their members are.
_SHAPES: dict[str, tuple[type, type]] = {
    **dict.fromkeys(("stages", "worked_in", "sources"), (dict, str)),
    "outcomes": (dict, dict),
    "metrics": (dict, object),
    **dict.fromkeys(("planned", "force"), (list, str)),
}
_NAMED: set[str | None] = set()  # damaged records that this process has named
_LINK = re.compile(r"(^|/)(runs/(?P<run>[^/]+)|stages/(?P<stage>[^/]+)/(?P<key>[0-9a-f]{8,}))(/|$)")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class PastRun:
    """A recorded run."""

    id: str  # name of its folder below `runs/`
    name: str  # the pipeline's name
    # RUNNING, FINISHED, FAILED, KILLED or PRUNED; one that died without a word stays RUNNING until it is swept.
    status: str
    started: str  # when the command began, ISO-8601 in UTC
    run_name: str = ""  # its name in Prefect and MLflow; the pipeline's name where an older version recorded it
    # Stage -> content key of the result that this run made or found committed.
    stages: Mapping[str, str] = field(default_factory=dict)
    # Stage -> content key of the folder that it worked in last, committed or not.
    worked_in: Mapping[str, str] = field(default_factory=dict)
    failed: str | None = None  # the stage that failed or was stopped; None: none did, or the process died
    mlflow_run_id: str | None = None  # its MLflow run; None: there is none
    # only, start, from_run, force: what its command had chosen.
    only: str | None = None
    start: str | None = None
    from_run: str | None = None
    force: Sequence[str] = ()
    sources: Mapping[str, str] = field(default_factory=dict)  # the recipe's files, which lie below `source/` -> SHA-256
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the whole record

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end without a failure; a trial that its sweep ended early did."""
        return self.status in ("FINISHED", "PRUNED")

    @property
    def title(self) -> str:
        """Its name, or its pipeline's, as a piece of a line."""
        return to_cell(self.run_name or self.name)

    @property
    def first_started(self) -> datetime | None:
        """When its first command began, by which the age of results counts; None: that was not recorded."""
        try:
            return datetime.fromisoformat(str(self.record.get("as_of") or self.started))
        except ValueError:
            return None

    @property
    def seconds(self) -> float | None:
        """Seconds that its last command took; None while it runs."""
        try:
            ended = datetime.fromisoformat(str(self.record.get("ended")))
            return (ended - datetime.fromisoformat(self.started)).total_seconds()
        except (ValueError, TypeError):
            return None

    @property
    def sweep(self) -> str | None:
        """The sweep that it is a trial of; None: of none."""
        found = self.record.get("sweep")
        return str(found) if found else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of its stages, by name."""
        found = self.record.get("metrics")
        metrics = found if isinstance(found, dict) else {}
        return {name: value for name, value in metrics.items() if type(value) in (int, float)}

    def is_meant(self, text: str) -> bool:
        """Whether a text is its name, one of its ids, or long enough a beginning of its id."""
        names = (self.id, self.run_name, self.mlflow_run_id)
        return text in names or (len(text) >= _SHORTEST and self.id.startswith(text))

    def __str__(self) -> str:
        ended = f"{self.failed} failed" if self.failed and self.status == "FAILED" else self.status.lower()
        return to_cell(f"{self.id} ({self.title}, {self.started[:16].replace('T', ' ')} UTC, {ended})")


def run_folder(storage: str, run_id: str) -> Store:
    """The folder of a run."""
    return Store.open(storage).child(RUNS, run_id)


def _warn_of(damage: DamagedError) -> None:
    # A command reads a record several times.
    if damage.field not in _NAMED:
        _NAMED.add(damage.field)
        _log.warning("%s", to_terminal(f"{damage.field} is left out: {damage.message} {damage.remedy}"))


def read_record(folder: Store, on_damage: Callable[[DamagedError], object] = _warn_of) -> dict[str, Any]:
    """The record in a run's folder; empty where there is none, or a damaged one. Raises StorageError.

    Args:
        on_damage: called for a damaged record; where it returns True, a changed record is taken as it is.
    """
    try:
        data = folder.read_if_exists(RUN_FILE, limit=_RUN_FILE_BYTES)
        record = parse_sealed(data) if data else {}
        for name, (kind, inner) in _SHAPES.items():
            value = record.get(name) or kind()
            members = value.values() if isinstance(value, dict) else value
            if not isinstance(value, kind) or not all(isinstance(member, inner) for member in members):
                raise ValueError(f"its field '{name}' is of another type")
        seconds = [outcome.get("seconds") for outcome in (record.get("outcomes") or {}).values()]
        if not all(type(value) in (int, float, NoneType) for value in seconds):
            raise ValueError("the time of a stage is not a number")
        if any(type(value) is int and value.bit_length() > 1000 for value in (record.get("metrics") or {}).values()):
            raise ValueError("a metric has too many digits")
        return record
    except (ValueError, DamagedError) as error:
        problem = "it is too large" if isinstance(error, DamagedError) else str(error)
        damage = DamagedError(
            f"The record of a run is damaged: {problem}.",
            field=f"{folder.url}/{RUN_FILE}",
            remedy="Restore the file, or remove it: the run's command then writes a new record.",
        )
        damage.__cause__ = error
        is_taken = on_damage(damage) is True
        return error.record if is_taken and isinstance(error, BrokenSealError) else {}


def write_record(folder: Store, record: Mapping[str, Any]) -> None:
    """Replace the record in a run's folder. Raises StorageError."""
    folder.replace(RUN_FILE, render_sealed(record))


def list_runs(storage: str, on_damage: Callable[[DamagedError], object] = _warn_of) -> list[PastRun]:
    """Every recorded run, the newest first; `on_damage` is that of `read_record`. Raises StorageError."""
    runs = Store.open(storage).child(RUNS)
    names = runs.children()

    def read(name: str) -> PastRun | None:
        return _read(name, read_record(runs.child(name), on_damage))

    if runs.is_local or len(names) < 2:
        found = [read(name) for name in names]
    else:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(read, names))
    return sorted((run for run in found if run is not None), key=lambda run: (run.started, run.id), reverse=True)


def raise_damage(damage: DamagedError) -> NoReturn:
    """Raise it: for who must not do without a record."""
    raise damage


def read_run(storage: str, run_id: str, on_damage: Callable[[DamagedError], object] = _warn_of) -> PastRun | None:
    """The run of a whole id; None where none is recorded. `on_damage` is that of `read_record`. Raises StorageError."""
    return _read(run_id, read_record(run_folder(storage, run_id), on_damage))


def find_run(storage: str, text: str, *, field: str, pipeline: str | None = None, needs: str | None = None) -> PastRun:
    """The run that `text` means: its id or the beginning of it, its name, a tag, the id of its MLflow run, or "last".

    The address of its folder means it as well, and that of a stage the newest run that has the stage's result.

    Args:
        field: the option that named it, for the message of an error.
        pipeline: the pipeline that it must be a run of; None: any.
        needs: the stage whose result is wanted: "last" is the newest run that has one, if there is any.

    Raises:
        ConfigError: no such run, several, or one of another pipeline. DamagedError: the run's record is damaged.
    """
    runs = list_runs(storage)
    if link := _LINK.search(text):
        stage, key = link["stage"] or "", link["key"]
        text = link["run"] or next((run.id for run in runs if run.stages.get(stage, "").startswith(key)), text)
    own = [run for run in runs if pipeline in (None, run.name)]
    matching = _newest(own, needs) if text == NEWEST else [run for run in runs if run.is_meant(text)]
    # Tags lie in files of their own, which are read only where nothing else fits.
    matching = matching or [run for run in own if text in read_tags(storage, run)]
    if not matching:
        if text in Store.open(storage).child(RUNS).children():
            read_record(run_folder(storage, text), raise_damage)
        raise _unknown(storage, text, runs, field, pipeline)
    if len(matching) > 1:
        remedy = f"Name one of them: {', '.join(run.id for run in matching)}."
        raise ConfigError("Several runs are meant by this.", field=field, value=text, remedy=remedy)
    [run] = matching
    if pipeline is not None and run.name != pipeline:
        others = [other for other in runs if other.name == pipeline]
        what = f"This is a run of the pipeline '{run.name}', and the spec is that of '{pipeline}'."
        remedy = f"Name a run of {pipeline}: {_listed(others)}." if others else f"No run of {pipeline} is recorded."
        raise ConfigError(what, field=field, value=text, remedy=remedy)
    return run


# -- tags -------------------------------------------------------------------------------------------------------------


def read_tags(storage: str, run: PastRun) -> list[str]:
    """The names that people gave a run, in their order."""
    return sorted(run_folder(storage, run.id).children(TAGS))


def tag_run(storage: str, run: PastRun, name: str) -> None:
    """Give a run a name, under which it is found and which keeps it from being cleaned up. Safe to repeat."""
    if not _TAG.fullmatch(name) or name == NEWEST:
        what = "A tag consists of letters, digits, '.', '_' and '-', at most 64 of them, and is not 'last'."
        raise ConfigError(what, field="NAME", value=name, remedy="Choose a name such as baseline or v1.2.")
    for other in list_runs(storage):
        if other.id != run.id and (name in (other.id, other.run_name) or name in read_tags(storage, other)):
            remedy = f"Choose another one, or take it from that run: trainflow tag {other.id} {name} --remove."
            raise ConfigError(f"The run {other} is found under this name.", field="NAME", value=name, remedy=remedy)
    folder = run_folder(storage, run.id)
    folder.create(f"{TAGS}/{name}", json.dumps({"tag": name}).encode())
    # After the tag is there: a removal that began before has not seen it, and one that begins now will.
    await_removal(folder)
    if not folder.exists(RUN_FILE):
        folder.delete_tree(TAGS)
        raise ConfigError("This run has just been removed.", field="RUN", value=run.id, remedy="Tag another one.")


def untag_run(storage: str, run: PastRun, name: str) -> None:
    """Take a name from a run. Raises ConfigError if the run does not have it."""
    tags = read_tags(storage, run)
    if name not in tags:
        remedy = f"Its tags are {', '.join(tags)}." if tags else "It has none."
        raise ConfigError(f"The run {run.id} does not have this tag.", field="NAME", value=name, remedy=remedy)
    run_folder(storage, run.id).delete(f"{TAGS}/{name}")


def newest_unfinished(storage: str, *, at_work: Collection[str] = ()) -> PastRun:
    """The newest run, but those `at_work`, that did not finish, and that no later run of its pipeline has replaced."""
    runs = [run for run in list_runs(storage) if run.id not in at_work]
    done: set[str] = set()
    for run in runs:
        if run.is_finished:
            done.add(run.name)
        elif run.name not in done:
            return run
    older = [run for run in runs if not run.is_finished]
    if older:
        what = "Every run that did not finish was followed by a finished run of its pipeline."
        raise ConfigError(what, field="RUN", remedy=f"Name the run to resume: {_listed(older)}.")
    what = "Every run that is recorded there has finished." if runs else "No run is recorded there."
    remedy = "Start one: trainflow run SPEC." if not runs else "Change the spec or the recipe, and run it."
    if at_work:
        what, remedy = ("Every unfinished run is running now.", "Wait for it; trainflow status shows where it is.")
    raise ConfigError(what, field="storage", value=Store.open(storage).url, remedy=remedy)


def describe_changes(storage: str, run: PastRun, keys: Mapping[str, StageKey]) -> list[Difference]:
    """Changes of spec and recipe since then; `keys` are those of the stages as far as they are decided now."""
    try:
        recorded = parse_record(run_folder(storage, run.id).read_if_exists(KEYS_FILE, limit=_KEYS_BYTES))
        return compare_all_keys(recorded, keys)
    except (KeyError, TypeError):
        return []  # of another version


def compare_all_keys(recorded: Mapping[str, Any], keys: Mapping[str, StageKey]) -> list[Difference]:
    """Differences of stages' keys from those that were recorded, by stage; what several stages share comes once."""
    found = [change for name, key in keys.items() if name in recorded for change in compare_keys(recorded[name], key)]
    return list({str(change): change for change in found}.values())


def take_result(storage: str, run: PastRun, stage: str) -> tuple[StageManifest | None, str]:
    """The result of a stage that a run made or found committed, and what to say of it; None with what is wrong."""
    key = run.stages.get(stage)
    if key is None:
        return None, f"run {run.id} has no committed result of it"
    manifest, damage = look_up_under(storage, stage, key)
    if manifest is not None:
        return manifest, f"taken from run {run.id}, committed {manifest.created}"
    return None, f"its result in run {run.id} {f'is damaged: {damage}' if damage else 'is gone from the storage'}"


def find_first_missing(run: PastRun, stages: Sequence[str]) -> str:
    """The stage to continue with: the one that failed, else the first not committed; ConfigError for none."""
    missing = [name for name in stages if name == run.failed or name not in run.stages]
    if missing:
        return missing[0]
    what = "This run has finished: every stage of it is committed."
    raise ConfigError(what, field="--from-run", value=run.id, remedy="Name the stage to begin with: --from STAGE.")


def _read(name: str, record: Mapping[str, Any]) -> PastRun | None:
    """The run of a record, whose collections `read_record` has checked."""
    if not isinstance(record.get("name"), str):
        return None
    texts = {key: value for key, value in record.items() if isinstance(value, str)}
    return PastRun(
        id=name,
        name=texts["name"],
        status=texts.get("status") or "RUNNING",
        started=texts.get("started", ""),
        run_name=texts.get("run_name", ""),
        stages=record.get("stages") or {},
        worked_in=record.get("worked_in") or {},
        **{key: texts.get(key) for key in ("failed", "mlflow_run_id", "only", "start", "from_run")},
        force=tuple(record.get("force") or ()),
        sources=record.get("sources") or {},
        record=record,
    )


def _newest(runs: Sequence[PastRun], needs: str | None) -> Sequence[PastRun]:
    fitting = [run for run in runs if needs is None or needs in run.stages][:1] or runs[:1]
    if fitting and fitting[0] is not runs[0]:
        _log.warning("last is the run %s: the newest one, %s, has no result of %s.", fitting[0], runs[0], needs)
    return fitting


def _unknown(storage: str, text: str, runs: Iterable[PastRun], field: str, pipeline: str | None) -> ConfigError:
    own = [run for run in runs if pipeline in (None, run.name)]
    by_name = {name: run.id for run in own for name in (run.id, run.mlflow_run_id) if name}
    by_name |= {run.run_name: run.run_name for run in own if run.run_name}
    near = nearest(text, by_name)
    remedy = f"Did you mean {near}? " if near else ""
    remedy += f"Recorded are {_listed(own)}." if own else "No run of this pipeline is recorded there."
    what = f"No run with this id, name or tag is recorded in {Store.open(storage).url}."
    return ConfigError(what, field=field, value=text, remedy=remedy)


def _listed(runs: Iterable[PastRun]) -> str:
    known = [str(run) for run in runs]
    more = f" and {len(known) - _LISTED} older" if len(known) > _LISTED else ""
    return ", ".join(known[:_LISTED]) + more
