"""What `prepare` leaves beside the rows, and how the other functions of a recipe read it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.protocol.recipe_functions import kind_of
from trainer_lib.storage import FileEntry, Store

T = TypeVar("T")

ASSETS = "assets"
MAX_FILE_BYTES = 1 << 30  # the largest file that read_file returns


class PrepareOutput:
    """The output of `prepare` besides rows: small JSON facts and small files (a tokenizer), stored beside the data.

    Attributes:
        info: JSON values, which other functions read as `DataInfo.info`; `new_columns` names columns that new rows may
            have in place of prepared ones, with their types.
        warnings: sentences about what may be wrong with the data; they are shown, and no part of it.
        sources: the spec's `prepare.sources` in their order: local ones as absolute paths, wherever this runs.
    """

    def __init__(self, store: Store, sources: Sequence[str] = ()) -> None:
        self.info: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.sources: tuple[str, ...] = tuple(sources)
        self._store = store
        self._files: dict[str, FileEntry] = {}

    def write_file(self, name: str, data: bytes) -> None:
        """Store `data` under a relative name, for `DataInfo.read_file(name)`. A second call replaces the file."""
        if not isinstance(data, bytes | bytearray):
            raise DataError(
                f"The function write_file takes bytes, and got {kind_of(data)}.",
                field="prepare",
                value=name,
                remedy="Encode a text: text.encode().",
            )
        try:
            entry = self._store.child(ASSETS).write_bytes(name, bytes(data))
        except ConfigError as error:
            error.field = "out.write_file"
            raise
        self._files[name] = FileEntry(f"{ASSETS}/{name}", entry.size, entry.sha256)

    def files(self) -> list[FileEntry]:
        """The files written so far, with paths relative to the stage's folder."""
        return [self._files[name] for name in sorted(self._files)]

    def checked_info(self) -> dict[str, Any]:
        """A copy of `info` as it will be read back. Raises DataError when a value is not JSON."""
        try:
            # Through JSON, as later stages read it: a tuple becomes a list here and not only there.
            copied: dict[str, Any] = parse_json(json.dumps(self.info, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"The values in out.info must be JSON ({error}).",
                field="prepare",
                remedy="Turn tensors and arrays into lists or numbers.",
            ) from error
        return copied


class DataInfo:
    """The prepared data, for the functions of a recipe.

    Attributes:
        info: JSON values from `prepare`.
        splits: split -> number of rows.
        history: in `after_evaluate`, the log entries of the model's training (`TrainerState.log_history`); else empty.
        url: folder of the prepare stage.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.info: dict[str, Any] = dict(data["info"])
        self.splits: dict[str, int] = {name: int(split["rows"]) for name, split in data["splits"].items()}
        self.history: list[dict[str, Any]] = []
        self.url = str(data["url"])
        self._files = {str(file["path"]): file for file in data["files"]}
        self._made: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}  # a data worker makes its own

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` returned when this process first asked for `name`: a tokenizer that each batch needs."""
        if name not in self._made:
            self._made[name] = make()
        found: T = self._made[name]
        return found

    def read_file(self, name: str) -> bytes:
        """The bytes that `prepare` wrote under `name`.

        Raises:
            ConfigError: `prepare` wrote no file of that name. DataError: its bytes changed since.
        """
        known = self._files.get(f"{ASSETS}/{name}")
        if known is None:
            written = sorted(path.removeprefix(f"{ASSETS}/") for path in self._files if path.startswith(ASSETS))
            names = f"It wrote: {', '.join(written)}." if written else "Write it there: out.write_file(name, bytes)."
            what = "The function prepare() wrote no such file."
            raise ConfigError(what, field="recipe", value=name, remedy=names)
        data = Store.open(self.url).child(ASSETS).read_bytes(name, limit=MAX_FILE_BYTES)
        if hashlib.sha256(data).hexdigest() != known["sha256"]:
            what = "The file differs from the one that prepare committed."
            raise DataError(what, field=name, remedy="Run with --force prepare.")
        return data
