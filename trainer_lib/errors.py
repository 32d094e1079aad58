"""Every failure trainflow reports, as one tree. Each class says whether a retry can help, and its exit code.

::

    TrainflowError                     1   anything of ours; never raised bare
    |-- ConfigError (ValueError)       2   bad input: a spec key, an argument, a URL          never retried
    |   `-- MissingExtraError          2   an optional dependency is not installed            never retried
    |-- CodeError                     10   the user's recipe or callback raised               never retried
    |-- DataError                     11   empty split, wrong schema, NaN in the data         never retried
    |-- NonFiniteError                12   loss or gradients stay NaN/inf                     never retried as is
    |-- OutOfMemoryError              13   host or device memory exhausted                    retried one rung lower
    |-- StorageError                  14   a store failed: network, permission, throttling    retried
    |   |-- StorageFullError          15   no space left: bytes needed and free               never retried
    |   |-- DamagedError              16   a committed file is missing or has other bytes     never retried
    |   `-- LeaseLostError            17   another process took the directory over            never retried
    |-- InfrastructureError           18   a worker vanished, rendezvous failed, a hang       retried
    |-- Preempted                     19   asked to stop (SIGTERM); saved; resumable          retried, free of charge
    |-- NotReproducibleError          20   a resumed run differs from an uninterrupted one    never retried
    `-- Interrupted                  130   Ctrl-C                                             never retried

A failure crosses a process boundary as a *record* (`to_record` / `from_record`): plain JSON, no pickle.
"""

from __future__ import annotations

import re
import traceback as _traceback
from typing import Any, ClassVar

from trainer_lib.secrets import MASK, is_secret, mask


class TrainflowError(Exception):
    """What is wrong, where, and what to do about it.

    Args:
        message: one sentence: what is wrong, and why.
        field: the spec key, argument or file it is about (``train.args.learning_rate``).
        value: the offending value, as the user wrote it. Recognizable secrets are masked, as in the texts.
        remedy: one sentence: what to do.
        rank, step: where in a distributed run it happened, when known.
        details: a traceback or log excerpt, shown with ``--debug`` only.
    """

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    title: ClassVar[str] = "failed"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        remedy: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        details: str | None = None,
    ) -> None:
        message = mask(message)
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = None if value is None else _shown(value, field or "")
        self.remedy = remedy
        self.rank = rank
        self.step = step
        self.details = None if details is None else mask(details)

    def __str__(self) -> str:
        where = self.field or ""
        if self.value is not None:
            where = f"{where} = {self.value}" if where else self.value
        text = f"{where}: {self.message}" if where else self.message
        return f"{text} {self.remedy}" if self.remedy else text

    def to_record(self) -> dict[str, Any]:
        """This failure as plain JSON, for a file or a pipe."""
        return {
            "class": type(self).__name__,
            "message": self.message,
            "field": self.field,
            "value": self.value,
            "remedy": self.remedy,
            "rank": self.rank,
            "step": self.step,
            "details": self.details,
            "retryable": self.retryable,
            "exit_code": self.exit_code,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Prefect and multiprocessing copy exceptions: keep every field."""
        return from_record, (self.to_record(),)


class ConfigError(TrainflowError, ValueError):
    """Bad input; found before any process or device is taken where that is possible."""

    exit_code = 2
    title = "bad input"


class MissingExtraError(ConfigError):
    """A feature was asked for whose package is not installed."""

    def __init__(self, message: str, *, extra: str | None = None, **fields: Any) -> None:
        if extra is not None:
            fields.setdefault("remedy", f'Install it: pip install "trainflow[{extra}]".')
        super().__init__(message, **fields)


class CodeError(TrainflowError):
    """The user's own code raised. `details` holds their traceback, cut to their frames."""

    exit_code = 10
    title = "your code raised"


class DataError(TrainflowError):
    """The data cannot be used as it is: empty, malformed, or not finite."""

    exit_code = 11
    title = "bad data"


class NonFiniteError(TrainflowError):
    """Loss or gradients were NaN or infinite for too many steps in a row."""

    exit_code = 12
    title = "not finite"


class OutOfMemoryError(TrainflowError):
    """Host or device memory ran out."""

    exit_code = 13
    retryable = True
    title = "out of memory"


class StorageError(TrainflowError):
    """A store could not be read or written."""

    exit_code = 14
    retryable = True
    title = "storage failed"


class StorageFullError(StorageError):
    """No space left on the device."""

    exit_code = 15
    retryable = False
    title = "disk full"


class DamagedError(StorageError):
    """A committed file is missing, truncated, or its digest differs."""

    exit_code = 16
    retryable = False
    title = "damaged"


class LeaseLostError(StorageError):
    """Another process has taken this directory over; whatever we have must not be committed."""

    exit_code = 17
    retryable = False
    title = "taken over"


class InfrastructureError(TrainflowError):
    """A worker died without a word, could not be started, or made no progress."""

    exit_code = 18
    retryable = True
    title = "worker lost"


class Preempted(TrainflowError):
    """Asked to stop; everything up to `step` is committed and the same command continues."""

    exit_code = 19
    retryable = True
    title = "preempted"


class NotReproducibleError(TrainflowError):
    """A run that was stopped and resumed does not equal the one that was not; names the first difference."""

    exit_code = 20
    title = "not the same"


class Interrupted(TrainflowError):
    """Ctrl-C."""

    exit_code = 130
    title = "interrupted"


_CLASSES: dict[str, type[TrainflowError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError,
        MissingExtraError,
        CodeError,
        DataError,
        NonFiniteError,
        OutOfMemoryError,
        StorageError,
        StorageFullError,
        DamagedError,
        LeaseLostError,
        InfrastructureError,
        Preempted,
        NotReproducibleError,
        Interrupted,
    )
}


def from_record(record: dict[str, Any]) -> TrainflowError:
    """Rebuild a failure from `TrainflowError.to_record`'s JSON; an unknown class becomes an InfrastructureError."""
    cls = _CLASSES.get(str(record.get("class")), InfrastructureError)
    fields = {name: record.get(name) for name in ("field", "value", "remedy", "rank", "step", "details")}
    return cls(str(record.get("message", "no message")), **fields)


def from_exception(error: BaseException, *, rank: int | None = None, step: int | None = None) -> TrainflowError:
    """The typed failure for any exception that escaped: ours as it is, the user's as a `CodeError`.

    MemoryError and torch's out-of-memory errors (recognised by name: this module imports no torch) become
    `OutOfMemoryError`, ENOSPC a `StorageFullError`, KeyboardInterrupt an `Interrupted`.
    """
    if isinstance(error, TrainflowError):
        error.rank = rank if error.rank is None else error.rank
        error.step = step if error.step is None else error.step
        return error
    details = "".join(_traceback.format_exception(error))
    where: dict[str, Any] = {"rank": rank, "step": step, "details": details}
    text = str(error) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Interrupted.", **where)
    if is_out_of_memory(error):
        return OutOfMemoryError(
            f"Memory ran out: {text.splitlines()[0]}",
            remedy="Lower per_device_train_batch_size (the global batch stays when global_batch_size is set).",
            **where,
        )
    if isinstance(error, OSError) and error.errno == 28:
        return StorageFullError(f"No space left: {text}", remedy="Free space, or choose another storage.", **where)
    return CodeError(f"{type(error).__name__}: {text}", **where)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device memory ran out: Python's, torch's (by name: no torch here), a device library's."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"}:
        return True
    text = str(error).lower()
    return "RuntimeError" in names and ("out of memory" in text or "can't allocate memory" in text)


def first_line(error: BaseException) -> str:
    """What an error says first, at most 300 characters; its class when it says nothing. Never empty.

    Clients of servers put whole responses into their errors, some beginning with an empty line.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _shown(value: object, field: str) -> str:
    if is_secret(re.split(r"[. ]", field)[-1], value):
        return MASK
    text = mask(value if isinstance(value, str) else repr(value))
    return text if len(text) <= 200 else text[:197] + "..."
