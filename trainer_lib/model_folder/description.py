"""`ModelDescription`: what a trained model consists of, in one small JSON file.

A published folder holds everything below itself::

    trainflow_model.json       this description
    model.safetensors, …       the weights
    code/                      the recipe and the project files that it imports
    assets/                    what `prepare` wrote for the model with `out.write_file` (a tokenizer)

A run's folder on the storage has a description, too. It names the places where the same files lie already, so nothing
is copied. Every file has its size and SHA-256: a reader uses no byte that differs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import from_record, to_record
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.storage import FileEntry, relative_problem
from trainer_lib.storage.commit import content_digest

FILE = "trainflow_model.json"
FORMAT = 1
CODE = "code"
ASSETS = "assets"
SOURCE = "source"  # a run's folder of the code
LIMIT = 64 * 2**20
"""The largest description that is read, in bytes."""


@dataclass(frozen=True)
class Places:
    """Folders of the files: URLs, or paths from the folder of the description, in which `..` leads upwards."""

    weights: str = "."  # of the model's files
    code: str = CODE  # of the recipe's files
    data: str = "."  # of the folder that holds `assets`
    # Name of a checkpoint of the stage that exported `weights`: the model has its weights instead.
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The description of a trained model."""

    name: str  # the pipeline's name
    recipe: str  # path of the recipe's file, from the folder of the code
    code: tuple[FileEntry, ...]  # the recipe's files
    weights: tuple[FileEntry, ...]  # the model's files
    fallback: str | None = None  # the file with the functions that the recipe does not define; None: there is none
    paths: tuple[str, ...] = (".",)  # folders below the code's that imports start from
    assets: tuple[FileEntry, ...] = ()  # what `prepare` wrote next to the data, below ``assets/``
    model: dict[str, Any] = field(default_factory=dict)  # settings that `build_model` is given
    options: dict[str, Any] = field(default_factory=dict)  # settings that `callbacks` is given
    args: dict[str, Any] = field(default_factory=dict)  # training arguments that predictions are made with
    info: dict[str, Any] = field(default_factory=dict)  # what `prepare` notes for the model
    rows: dict[str, int] = field(default_factory=dict)  # split -> number of rows
    # Column of a prepared row -> its type (``float32[8,8]``, ``int64[*]``, ``string``).
    columns: dict[str, str] = field(default_factory=dict)
    stages: dict[str, str] = field(default_factory=dict)  # stage -> key of the stage that made it
    versions: dict[str, str] = field(default_factory=dict)  # package -> version that the model was made with
    places: Places = field(default_factory=Places)  # where the files lie

    @property
    def code_digest(self) -> str:
        """SHA-256 of all that decides what is executed, 64 hex digits: what a reader may trust by name.

        These are the files, where they begin, and the settings that they are given.
        """
        decides = {
            "files": content_digest(self.code),
            "begins": [self.recipe, self.fallback, *self.paths],
            "settings": [self.model, self.options, self.args],
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> bytes:
        """The contents of the file; equal descriptions have equal bytes."""
        record = {"format": FORMAT, **to_record(self)}
        return json.dumps(record, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def read_description(data: bytes, where: str) -> ModelDescription:
    """The description in the bytes of the file at `where`. Raises DamagedError, or ConfigError for a newer version."""
    try:
        record = parse_json(data, dict)
    except ValueError as error:
        what = f"The description of the model is not JSON that trainflow writes: {error}."
        raise DamagedError(what, field=where) from error
    if record.get("format") != FORMAT:
        what = f"The description has format {record.get('format')!r}, and this version reads format {FORMAT}."
        raise ConfigError(what, field=where, remedy="Load it with the version of trainflow that wrote it.")
    try:
        # A newer version may have written more, which this one does not need.
        plain = {name: value for name, value in record.items() if name != "format"}
        description = from_record(ModelDescription, plain, name=FILE, ignore_unknown=True)
    except ConfigError as error:
        raise DamagedError(f"The description of the model is damaged: {error.message}", field=where) from error
    files = [entry.path for entry in (*description.code, *description.weights, *description.assets)]
    folders = [path for path in description.paths if path != "."]
    for path in (description.recipe, description.fallback or description.recipe, *folders, *files):
        if problem := relative_problem(path):
            raise DamagedError(f"A path in the description {problem}.", field=where, value=path)
    return description
