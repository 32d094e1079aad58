"""`Lineage`: what a model was made from, link by link, in one small JSON file next to it.

    sources ─▶ prepare-data ─▶ train ─▶ checkpoints ─▶ evaluate ─▶ push-to-hub ─▶ the files of a publication
                                 └────▶ MLflow run

Every link points to what came before it, so nothing that is published has to be rewritten. What came after is
recorded where it came about: the hub's commit in the run's folder and in the result of push-to-hub, the registry's
version in the registry, under the model's digest. The file holds digests, keys and names; it holds no address, so
reading one leads to no other machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.base.json_text import parse_json, seal_of
from trainer_lib.base.records import from_record, to_record
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.secrets import mask_value
from trainer_lib.storage import FileEntry, Store, relative_problem

FILE = "lineage.json"
FORMAT = 1
LIMIT = 16 * 2**20
"""The largest file that is read, in bytes."""
_REMEDY = "Nothing in it was used. Get the folder from where it was published."
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHECKPOINT = re.compile(r"checkpoint-\d{1,18}")


@dataclass(frozen=True, kw_only=True)
class SourceLink:
    """A source of the data: its label, never an absolute path, and its digest or the tag that its server gives."""

    source: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class StageLink:
    """The result of a stage."""

    stage: str
    key: str  # its content key, SHA-256
    content_digest: str | None = None  # of its files; None: its commit file could not be read when this was written
    # Stage -> content digest of its result that this one was made from.
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointLink:
    """A checkpoint that was kept: its optimizer step, and the content digest of its files."""

    name: str
    step: int
    content_digest: str


@dataclass(frozen=True, kw_only=True)
class PublicationLink:
    """A publication: its commit on the hub or its folder's name, and the content digest of its files."""

    revision: str
    content_digest: str


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The lineage of a model."""

    name: str  # the pipeline's name
    sources: tuple[SourceLink, ...] = ()  # of the data
    stages: tuple[StageLink, ...] = ()  # in the order in which they ran
    checkpoints: tuple[CheckpointLink, ...] = ()  # of the training, oldest first
    exported: str | None = None  # the checkpoint whose weights are those of the model; None: none is
    # The MLflow run of the training, by the name that it has before its server is reached: the run's tag
    # `trainflow.attempt`.
    tracked_run: str | None = None
    mlflow_run_id: str | None = None  # the same run by the id that its server gave it, where that was known
    # Of the code that predicts (`ModelDescription.code_digest`); None: it is not published.
    code_digest: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # those of the training that differ from the defaults
    versions: dict[str, str] = field(default_factory=dict)  # package -> version that the model was trained with
    run: str | None = None  # the run on the storage; None in a publication, which any number of runs may have made
    publication: PublicationLink | None = None  # where the run published the model; None in the publication itself
    files: tuple[FileEntry, ...] = ()  # of the folder that this file lies in, without this file

    def stage(self, name: str) -> StageLink | None:
        """The result of a stage; None where there is none."""
        return next((stage for stage in self.stages if stage.stage == name), None)

    def to_json(self) -> bytes:
        """The contents of the file, without secrets; equal lineages have equal bytes. Its seal covers all of it."""
        plain = {"format": FORMAT, **mask_value("", to_record(self))}
        # Through JSON: the seal covers what a reader of the file gets.
        record = parse_json(json.dumps(plain, allow_nan=False))
        return json.dumps({**record, "seal": seal_of(record)}, indent=1, sort_keys=True).encode() + b"\n"


def read_lineage(data: bytes, where: str) -> Lineage:
    """The lineage in the bytes of the file at `where`, from anyone. Raises DamagedError if its seal does not fit."""
    try:
        record = parse_json(data, dict)
    except ValueError as error:
        raise _bad(f"cannot be read: {error}", where) from error
    if record.get("format") != FORMAT:
        what = f"The lineage has format {record.get('format')!r}, and this version reads format {FORMAT}."
        raise ConfigError(what, field=where, remedy="Read it with the version of trainflow that wrote it.")
    seal = record.pop("seal", None)
    expected = seal_of(record)
    record.pop("format")
    try:
        lineage = from_record(Lineage, record, name=FILE, ignore_unknown=True)
    except ConfigError as error:
        raise _bad(f"has another form ({error})", where) from error
    for problem in _problems(lineage):
        raise _bad(problem, where)
    if seal != expected:
        what = "The lineage was altered after it was written: its seal does not fit."
        raise DamagedError(what, field=where, remedy=_REMEDY)
    return lineage


def read_lineage_file(folder: Store) -> Lineage | None:
    """The lineage in a folder; None without one. Raises what `read_lineage` raises, and StorageError."""
    where = f"{folder.url}/{FILE}"
    try:
        data = folder.read_if_exists(FILE, limit=LIMIT)
    except DamagedError as error:
        raise _bad(f"has more than {LIMIT:,} bytes", where) from error
    return None if data is None else read_lineage(data, where)


def _problems(lineage: Lineage) -> Iterator[str]:
    """Reasons to distrust a lineage: malformed names and digests, and paths that lead out."""
    if len({stage.stage for stage in lineage.stages}) < len(lineage.stages):
        yield "names a stage twice"
    for stage in lineage.stages:
        names, digests = [stage.stage, *stage.inputs], [stage.key, stage.content_digest, *stage.inputs.values()]
        if not all(_NAME.fullmatch(name) for name in names):
            yield f"names a stage {stage.stage[:100]!r}, which is not a name"
        yield from _digest_problems(f"the stage {stage.stage}", digests)
    for checkpoint in lineage.checkpoints:
        if not _CHECKPOINT.fullmatch(checkpoint.name):
            yield f"names a checkpoint {checkpoint.name[:100]!r}, which is not one"
        yield from _digest_problems(checkpoint.name, [checkpoint.content_digest])
    for entry in lineage.files:
        if problem := relative_problem(entry.path):
            yield f"names a file {entry.path[:100]!r}, whose path {problem}"
        yield from _digest_problems(f"the file {entry.path}", [entry.sha256])
    published = lineage.publication
    texts = [lineage.run, lineage.mlflow_run_id, lineage.tracked_run, published.revision if published else None]
    wrong = [text for text in texts if text is not None and not _NAME.fullmatch(text)]
    if wrong:
        yield f"names a run or a revision {wrong[0][:100]!r}, which is not a name"
    yield from _digest_problems("the publication", [published.content_digest if published else None])


def _digest_problems(what: str, digests: Iterable[str | None]) -> Iterator[str]:
    if not all(digest is None or _SHA256.fullmatch(digest) for digest in digests):
        yield f"has a digest of {what[:100]} that is not a SHA-256"


def _bad(what: str, where: str) -> ConfigError:
    return ConfigError(f"The lineage {what}.", field=where, remedy=_REMEDY)
