"""Manifests, which stages exchange. One exists if and only if its stage is complete, and every hit is verified.

    <storage>/stages/<stage>/<key[:16]>/
        key.json        every field of the content key, so that a miss can be explained
        attempts/       one record when an attempt begins, one when it ends
        lease/          the process at work here
        ...             the stage's files
        COMMIT.json     written last: the names, sizes and digests of the files, metrics and lineage

Neither prefect nor torch is imported here.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, cast

from typing_extensions import TypeVar

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import from_record, to_record
from trainer_lib.errors import ConfigError, DamagedError, NewerVersionError
from trainer_lib.locks.removal import await_removal
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import COMMIT, Commit, read_commit, verify_files
from trainflow.tasks.keys.keys import FOLDER_CHARS, REFRESH, Difference, StageKey, describe_code, differences
from trainflow.tasks.stage.facts import StageFacts

STAGES = "stages"
KEY_FILE = "key.json"
_KEY_BYTES = 16 << 20
_READ_BACK_BYTES = 256 << 20
"""On a remote store digests are checked up to this many bytes, beyond it the sizes: a hit must not download a model."""
_TRUST_S = 60.0
"""A run verifies each result twice, for its plan and in the stage; digests are read back again only after this time."""

_verified: dict[tuple[str, str, str], float] = {}


F = TypeVar("F", bound=StageFacts, default=Any)
G = TypeVar("G", bound=StageFacts)

_FIRST = "first_key"
_FACTS, _HALVINGS = "meta", "batch_halvings"


@dataclass(frozen=True)
class StageManifest(Generic[F]):
    """A completed stage: where its files are, what they are, what it measured, and why it ran.

    Attributes:
        key: content key, SHA-256 in hex.
        url: the stage's folder.
        content_digest: SHA-256 over the names and contents of the files.
        metrics: name -> number; of evaluate split -> name -> number.
        facts: what this stage states besides, see `trainflow.tasks.stage.facts`.
        reason: why it ran ("never run before", "args.seed: 1 -> 2").
        attempt: number of the attempt that succeeded, from 1.
        batch_halvings: how often the micro-batch was halved, because memory had run out.
        created: time of the commit, ISO-8601 in UTC.
        first_key: the key of the first result with the same settings and inputs, which this one was made to follow
            because of its age; its own key otherwise.
    """

    stage: str
    key: str
    url: str
    content_digest: str
    files: tuple[FileEntry, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    facts: F = field(default=cast("F", StageFacts()))
    reason: str = ""
    attempt: int = 1
    batch_halvings: int = 0
    created: str = ""
    first_key: str = ""

    def __post_init__(self) -> None:
        if not self.first_key:
            object.__setattr__(self, "first_key", self.key)

    @classmethod
    def from_commit(cls, url: str, commit: Commit) -> StageManifest:
        """The manifest that a stage's commit file stands for. Raises DamagedError for any other commit file."""
        record = {**commit.meta, "url": url, "content_digest": commit.content_digest, "created": commit.created}
        try:
            return cls._from_record(record, commit.files)
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise DamagedError("This is not a stage's commit file.", field=url, remedy="Delete the folder.") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageManifest:
        """The inverse of `to_dict`. Raises ConfigError for what is not a manifest."""
        try:
            files = tuple(FileEntry(str(f["path"]), int(f["size"]), str(f["sha256"])) for f in data["files"])
            return cls._from_record(data, files)
        except (KeyError, TypeError, ValueError) as error:
            what = "This is not a stage's manifest."
            raise ConfigError(what, remedy="Pass on what the stage before returned.") from error

    @classmethod
    def _from_record(cls, record: Mapping[str, Any], files: tuple[FileEntry, ...]) -> StageManifest:
        stage, meta = str(record["stage"]), dict(record[_FACTS])
        storage = str(record["url"]).rpartition(f"/{STAGES}/{stage}/")[0]
        return cls(
            stage=stage,
            key=str(record["key"]),
            url=str(record["url"]),
            content_digest=str(record["content_digest"]),
            files=files,
            metrics=dict(record["metrics"]),
            facts=cast("F", StageFacts.of_stage(stage, meta).located(storage)),
            reason=str(meta.get("reason", "")),
            attempt=int(meta.get("attempt", 1)),
            batch_halvings=int(meta.get(_HALVINGS, 0)),
            created=str(record["created"]),
            first_key=str(meta.get(_FIRST, "")),
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON: what `trainflow run --json` and the report show."""
        first = self.first_key if self.first_key != self.key else None
        return {
            "stage": self.stage,
            "key": self.key,
            "url": self.url,
            "content_digest": self.content_digest,
            "files": [to_record(entry) for entry in self.files],
            "metrics": self.metrics,
            _FACTS: commit_facts(self.facts, self.reason, self.attempt, self.batch_halvings, first),
            "created": self.created,
        }

    def with_facts(self, kind: type[G]) -> StageManifest[G]:
        """This manifest, known to hold facts of `kind`. Raises ConfigError for that of another stage."""
        if not isinstance(self.facts, kind):
            needed = next((name for name, known in StageFacts.by_stage.items() if known is kind), kind.__name__)
            what = f"The manifest of {needed} is needed here."
            raise ConfigError(what, field=needed, value=self.stage, remedy="Pass on what that stage returned.")
        return cast("StageManifest[G]", self)

    def store(self) -> Store:
        """The folder with the files."""
        return Store.open(self.url)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Prefect writes and reads results through pydantic: as the JSON above, never as a pickle."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            cls._validated, serialization=core_schema.plain_serializer_function_ser_schema(cls.to_dict)
        )

    @classmethod
    def _validated(cls, value: Any) -> StageManifest:
        if isinstance(value, cls):
            return value
        if "facts" in value:  # Prefect's JSON serializer takes a dataclass apart field by field
            facts = StageFacts.of_stage(value["stage"], value["facts"])
            files = tuple(from_record(FileEntry, entry) for entry in value["files"])
            return cls(**{**value, "facts": facts, "files": files})
        return cls.from_dict(value)


def commit_facts(
    facts: StageFacts, reason: str, attempt: int, batch_halvings: int, first_key: str | None = None
) -> dict[str, Any]:
    """A stage's facts and provenance in the one mapping in which a commit file has them."""
    first = {} if first_key is None else {_FIRST: first_key}
    return {**to_record(facts), "reason": reason, "attempt": attempt, _HALVINGS: batch_halvings, **first}


def stage_store(storage: str, key: StageKey) -> Store:
    """The folder of a stage under a key."""
    return stage_folder(Store.open(storage), key.stage, key.digest)


def stage_folder(storage: Store, stage: str, key: str) -> Store:
    """`stage_store` for a key of which only the digest is known."""
    return storage.child(STAGES, stage, key[:FOLDER_CHARS])


def look_up(storage: str, key: StageKey) -> tuple[StageManifest | None, str | None]:
    """``(manifest, None)`` of an intact result, ``(None, problem)`` of a damaged one, ``(None, None)`` if none.

    The result of another stage or key in this folder, moved or restored there by hand, is a damaged one. Raises
    NewerVersionError for what a newer trainflow committed.
    """
    return look_up_under(storage, key.stage, key.digest)


def look_up_under(storage: str, stage: str, key: str) -> tuple[StageManifest | None, str | None]:
    """`look_up` for a key of which only the digest is known, 64 hex digits."""
    store = stage_folder(Store.open(storage), stage, key)
    found = _look_into(store, stage, key)
    # A result that is being removed, or was removed since the look, is looked at again (`trainer_lib.locks.removal`).
    while found != (None, None) and (await_removal(store) or not store.exists(COMMIT)):
        found = _look_into(store, stage, key)
    return found


def _look_into(store: Store, stage: str, key: str) -> tuple[StageManifest | None, str | None]:
    try:
        commit = read_commit(store, kind="stage")
        if commit is None:
            return None, None
        manifest = StageManifest.from_commit(store.url, commit)
    except NewerVersionError:
        raise  # to be left as it is: what counts as damaged is withdrawn and made again
    except DamagedError as error:
        return None, error.message
    if (manifest.stage, manifest.key) != (stage, key):
        return None, f"the folder holds the result of {manifest.stage} under the key {manifest.key[:16]}"
    read_back = store.is_local or sum(entry.size for entry in commit.files) <= _READ_BACK_BYTES
    # With the time: a result that was made again at this place is read back again.
    known = (store.url, commit.content_digest, commit.created)
    lately = time.monotonic() - _verified.get(known, -math.inf) < _TRUST_S
    problems = verify_files(store, commit, digests=read_back and not lately)
    if not problems:
        # Not renewed by a hit: trust ends a fixed time after the bytes were read.
        _verified[known] = _verified[known] if lately else time.monotonic()
        return manifest, None
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return None, f"{problems[0]}{more}"


def look_up_in(storage: str, stage: str, folder: str) -> StageManifest | None:
    """The result that a stage committed in a folder of its own, whatever its key; None without an intact one."""
    store = stage_folder(Store.open(storage), stage, folder)
    try:
        commit = read_commit(store, kind="stage")
        return None if commit is None else StageManifest.from_commit(store.url, commit)
    except (DamagedError, NewerVersionError):
        return None


def belongs_to_other_key(store: Store, key: StageKey) -> bool:
    """Whether what lies in the stage's folder, finished or not, was made under another key."""
    record = read_key(store)
    made_for = {None if record is None else record.get("key")}
    with contextlib.suppress(DamagedError):  # half written: the key that can be read decides
        if (commit := read_commit(store, kind="stage")) is not None:
            made_for.add(str(commit.meta.get("key")))
    return bool(made_for - {None, key.digest})


def compare_with(storage: str, key: StageKey, older: str) -> list[Difference]:
    """The fields in which `key` differs from an older key of the stage, given by its digest."""
    record = read_key(stage_folder(Store.open(storage), key.stage, older))
    return [] if record is None else compare_keys(record, key)


def compare_keys(record: Mapping[str, Any], key: StageKey) -> list[Difference]:
    """The fields in which `key` differs from a recorded one, which is the content of a ``key.json``."""
    return describe_code(differences(record["fields"], key.fields), record, key.places)


def read_key_fields(storage: str, stage: str, key: str) -> dict[str, Any] | None:
    """Every field of a recorded content key, given by its digest; None where the record is gone or torn."""
    record = read_key(stage_folder(Store.open(storage), stage, key))
    return None if record is None else dict(record["fields"])


@dataclass(frozen=True)
class Miss:
    """Why a stage has to run: the nearest earlier key and the fields that differ from it."""

    reason: str
    nearest: str | None = None
    differences: tuple[Difference, ...] = ()


def explain_miss(storage: str, key: StageKey) -> Miss:
    """Why nothing is committed under `key`, field by field against the nearest earlier run of the stage."""
    stages = Store.open(storage).child(STAGES, key.stage)
    if stages.exists(f"{key.folder}/{KEY_FILE}"):
        # The folder is there under this very key, so no field differs.
        return Miss("an earlier attempt did not finish", key.folder)
    if key.because is not None:
        return Miss(key.because)
    return _explain_nearest(stages, key) or Miss("its result is gone from the storage")


def explain_certain_miss(storage: str, key: StageKey, unknown: Collection[str]) -> Miss | None:
    """Why nothing can be committed under `key`, whatever the fields named `unknown` turn out to be.

    Those depend on stages which run first. None when an earlier run differs in them alone: its result may be the right
    one.
    """
    return _explain_nearest(Store.open(storage).child(STAGES, key.stage), key, unknown)


def _explain_nearest(stages: Store, key: StageKey, unknown: Collection[str] = ()) -> Miss | None:
    """Differences of `key` from the nearest earlier run; None: there are none."""
    found: list[tuple[int, bool, str, list[Difference]]] = []
    for name in stages.children():
        record = read_key(stages.child(name))
        if record is not None and _same_subject(record["fields"], key.fields):
            # Results that follow each other differ in nothing that a user has changed.
            ignored = {*unknown, REFRESH}
            known = [change for change in differences(record["fields"], key.fields) if change.field not in ignored]
            changed = describe_code(known, record, key.places)
            # Of equally near runs a committed one comes first.
            found.append((len(changed), not stages.exists(f"{name}/COMMIT.json"), name, changed))
    if not found:
        return Miss("never run before")
    _, _, name, changed = min(found, key=lambda candidate: candidate[:3])
    # Another schema gives the key other fields, so their differences say nothing about the user's settings.
    if schema := tuple(change for change in changed if change.field == "schema"):
        return Miss("a newer trainflow keys or writes this stage in another form", name, schema)
    return Miss(summary(changed), name, tuple(changed)) if changed else None


_MUCH_CODE = 20


def _same_subject(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether two keys of a stage belong to one pipeline: they share a recipe's file, or the published name.

    Pipelines may share a storage; another one's run explains nothing, nor does one with mostly other code.
    """
    if "recipe" in ours:
        mine, other = (set(fields.get("recipe") or ()) for fields in (ours, theirs))
        is_other = len(mine | other) > _MUCH_CODE and 2 * len(mine & other) < len(mine | other)
        files, theirs_too = ({label.partition(":")[0] for label in labels} for labels in (mine, other))
        return not is_other and not files.isdisjoint(theirs_too)
    return bool(theirs.get("name") == ours.get("name"))


def summary(changed: list[Difference], most: int = 3) -> str:
    """The differences in one line."""
    parts = [str(difference) for difference in changed[:most]]
    if len(changed) > most:
        parts.append(f"and {len(changed) - most} more")
    return "; ".join(parts)


def read_key(store: Store) -> dict[str, Any] | None:
    """The record of the key in a stage's folder, its `fields` and more; None without one that can be read."""
    try:
        data = store.read_if_exists(KEY_FILE, limit=_KEY_BYTES)
        record = parse_json(data) if data else None
        return {**record, "fields": dict(record["fields"])} if record else None
    except (ValueError, KeyError, TypeError, DamagedError):
        return None  # of another program, or half written
