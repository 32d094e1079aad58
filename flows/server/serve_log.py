"""The log file of `trainflow serve`: what it says and what its runs print, without secrets, in files that rotate."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from rich.text import Text
from typing_extensions import override

from trainer_lib.errors import StorageError
from trainer_lib.secrets import mask
from trainer_lib.storage import Store

_BYTES = 10 * 2**20
_KEPT = 5


def log_path(storage: str, folder: str | None, name: str) -> Path:
    """Where the log of the deployment `name` lies: below a local storage, else in `.trainflow` of the spec's folder."""
    store = Store.open(storage)
    base = store.local_path() if store.is_local else Path(folder or ".") / ".trainflow"
    return base / "logs" / f"serve-{name}.log"


@contextlib.contextmanager
def logged(path: Path) -> Iterator[None]:
    """Inside the block everything that goes to stdout and stderr is written to the file at `path`, too.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=_BYTES, backupCount=_KEPT, encoding="utf-8", delay=False)
    except OSError as error:
        raise StorageError(
            f"The log cannot be written: {error.strerror or error}.",
            field=str(path),
            remedy="Choose a storage that this user may write.",
        ) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    # A full disk must not end the serving process.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    out, err = _Tee(sys.stdout, handler), _Tee(sys.stderr, handler)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        out.end_line()
        err.end_line()
        handler.close()


class _Tee(io.TextIOBase):
    """A stream that passes on what is written, and adds each whole line to a log."""

    def __init__(self, stream: TextIO, handler: logging.Handler) -> None:
        self._stream = stream
        self._handler = handler
        self._line = ""
        # Prefect writes what runs print from threads.
        self._lock = threading.Lock()

    @override
    def write(self, text: str, /) -> int:
        with self._lock:
            self._stream.write(text)
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                self._add(line)
        return len(text)

    @override
    def flush(self) -> None:
        self._stream.flush()

    @override
    def isatty(self) -> bool:
        return self._stream.isatty()

    @override
    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream, which rich asks for."""
        return self._stream.encoding

    def end_line(self) -> None:
        """Add what was written without an end of line."""
        with self._lock:
            if self._line:
                self._add(self._line)
                self._line = ""

    def _add(self, line: str) -> None:
        # A terminal's colours say nothing in a file.
        plain = Text.from_ansi(line.rstrip("\r")).plain
        self._handler.handle(logging.makeLogRecord({"msg": mask(plain), "levelno": logging.INFO}))
