"""Every failure that trainflow reports, as one tree. Each class states its exit code and whether a retry can help.

::

    TrainflowError                     1   the base class; never raised itself
    |-- ConfigError (ValueError)       2   bad input: a spec key, an argument, a URL          never retried
    |   `-- MissingExtraError          2   an optional dependency is not installed            never retried
    |-- CodeError                     10   the user's recipe or callback raised               never retried
    |-- DataError                     11   empty split, wrong schema, NaN in the data         never retried
    |-- NonFiniteError                12   loss or gradients stay NaN/inf                     never retried as is
    |   `-- LossSpikeError            12   the loss spikes more often than allowed            never retried as is
    |-- OutOfMemoryError              13   host or device memory exhausted                    retried, batch halved
    |-- StorageError                  14   a store failed: network, permission, throttling    retried
    |   |-- StoreUnreachableError     14   a store does not answer                            retried for minutes
    |   |-- StorageFullError          15   no space left; states the bytes needed and free     never retried
    |   |-- StorageGoneError          14   renamed or removed while a command worked on it     never retried
    |   |-- DamagedError              16   a committed file is missing or has other bytes     never retried
    |   |   |-- NewerVersionError      2   a newer trainflow wrote it                         never retried
    |   |   `-- BrokenLineageError    16   a link of a lineage does not hold                  never retried
    |   `-- LeaseLostError            17   another process took the directory over            never retried
    |-- InfrastructureError           18   a worker died, the rendezvous failed               retried
    |   `-- HangError                 18   no progress for the stage's `timeout_s`            once per place
    |-- Preempted                     19   asked to stop (SIGTERM); saved; resumable          retried, free of charge
    |   `-- PreemptedByNotice         19   this machine is about to be taken away; saved        never retried here
    |-- NotReproducibleError          20   a resumed run, or a copy on another process, differs    never retried
    |-- GateError                     21   an evaluation misses what the spec requires        never retried
    `-- Interrupted                  130   Ctrl-C                                             never retried
        `-- Pruned                  130   a sweep ended this trial early                     never retried

A failure is rendered as one line, ``field = value: message remedy``, where message and remedy are whole sentences::

    learning_rate = -1: The learning rate must not be negative. Give a number from 0 on.

It crosses a process boundary as a *record* (`to_record`, `from_record`): plain JSON, no pickle.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import traceback as _traceback
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.secrets import MASK, is_secret, mask


class TrainflowError(Exception):
    """A failure: what is wrong, where, and what to do about it.

    Args:
        message: a whole sentence that reads well alone: what is wrong, and why.
        field: the spec key, argument or file that is wrong (``train.args.learning_rate``).
        value: the offending value, as the user wrote it. Recognizable secrets are masked, as in the texts.
        remedy: a whole sentence: what to do.
        rank: the rank of the process that failed, if known.
        step: the optimizer step at which it failed, if known.
        details: a traceback or an excerpt of a log, shown only with ``--debug``.

    Attributes:
        exit_code: the exit code of a process that ends with this failure.
        retryable: whether the same work may succeed when it is tried again.
        title: the failure in a word or two, for a terminal.
        partial_result: what the failed work did complete, when it is set: a `PipelineResult` for a pipeline run.
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
        # Masked where it comes in, so that no output has to think of it.
        message = mask(message)
        super().__init__(message)
        self.message = message
        self.field = None if field is None else mask(field)
        self.value = None if value is None else _shown(value, field or "")
        self.remedy = None if remedy is None else mask(remedy)
        self.rank = rank
        self.step = step
        self.details = None if details is None else mask(details)
        self.partial_result: object = None

    def __str__(self) -> str:
        where = self.field or ""
        if self.value is not None:
            where = f"{where} = {self.value}" if where else self.value
        text = f"{where}: {self.message}" if where else self.message
        if self.remedy and text[-1:] not in ".!?:\n":  # a message that another library wrote
            text += "."
        return f"{text} {self.remedy}" if self.remedy else text

    def to_record(self) -> dict[str, Any]:
        """Render the failure as plain JSON, for a file or a pipe."""
        names = ("message", "field", "value", "remedy", "rank", "step", "details", "retryable", "exit_code")
        return {"class": type(self).__name__, **{name: getattr(self, name) for name in names}}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy by way of the record: Prefect and multiprocessing copy exceptions, and every field must survive."""
        return from_record, (self.to_record(),)


class ConfigError(TrainflowError, ValueError):
    """The input is wrong; found before any process or device is taken, where that is possible."""

    exit_code = 2
    title = "bad input"


class MissingExtraError(ConfigError):
    """The package of a requested feature is not installed; `extra` names the extra of trainflow that brings it."""

    def __init__(self, message: str, *, extra: str | None = None, **fields: Any) -> None:
        if extra is not None:
            fields.setdefault("remedy", f'Install it: pip install "trainflow[{extra}]".')
        super().__init__(message, **fields)


class CodeError(TrainflowError):
    """The user's own code raised; `details` holds the traceback, cut to the user's frames."""

    exit_code = 10
    title = "your code raised"


class DataError(TrainflowError, ValueError):
    """The data cannot be used as it is: empty, malformed, or not finite."""

    exit_code = 11
    title = "bad data"


class NonFiniteError(TrainflowError):
    """Loss or gradients were NaN or infinite for too many steps in a row."""

    exit_code = 12
    title = "not finite"


class LossSpikeError(NonFiniteError):
    """The loss spiked again after as many rollbacks as are allowed."""

    title = "loss spikes"


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


class StoreUnreachableError(StorageError):
    """A store does not answer: the network is interrupted, or its server is down or overloaded."""

    title = "storage out of reach"


class StorageFullError(StorageError):
    """A store has no space left."""

    exit_code = 15
    retryable = False
    title = "disk full"


class StorageGoneError(StorageError):
    """A storage was renamed or removed while a command worked on it; it is not made again, half empty."""

    retryable = False
    title = "storage gone"


class DamagedError(StorageError):
    """A committed file is missing, truncated, or its digest differs."""

    exit_code = 16
    retryable = False
    title = "damaged"


class NewerVersionError(DamagedError):
    """A folder was committed by a newer trainflow, in a format that this one cannot read; it is left as it is."""

    exit_code = 2
    title = "written by a newer version"


class BrokenLineageError(DamagedError):
    """A link between data, stages, checkpoints, runs and publications is not as it was recorded."""

    title = "lineage broken"


class LeaseLostError(StorageError):
    """Another process has taken this directory over, so our work in it must not be committed."""

    exit_code = 17
    retryable = False
    title = "taken over"


class InfrastructureError(TrainflowError):
    """A worker died without an error, or could not be started."""

    exit_code = 18
    retryable = True
    title = "worker lost"


class HangError(InfrastructureError):
    """The workers made no progress for the `timeout_s` of their launch; the message names where each rank stands."""

    title = "hung"


class Preempted(TrainflowError):
    """The run was asked to stop; everything up to `step` is committed, and the same command continues."""

    exit_code = 19
    retryable = True
    title = "preempted"


class PreemptedByNotice(Preempted):
    """This machine is about to be taken away: another try here would only be stopped again."""

    retryable = False


class NotReproducibleError(TrainflowError):
    """A run that was resumed or repeated, or a copy on another process, is not equal. Names the first difference."""

    exit_code = 20
    title = "not the same"


class GateError(TrainflowError):
    """A model was held back from publication: its evaluation does not meet a requirement of the spec."""

    exit_code = 21
    title = "gate not passed"


class Interrupted(TrainflowError):
    """The user pressed Ctrl-C."""

    exit_code = 130
    title = "interrupted"


class Pruned(Interrupted):
    """A sweep ended this trial early: others reached more by then."""

    title = "pruned"


# By name, so that a record can name no class but those above.
_CLASSES: dict[str, type[TrainflowError]] = {
    name: value
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, TrainflowError) and value is not TrainflowError
}


def from_record(record: dict[str, Any]) -> TrainflowError:
    """Rebuild a failure from `TrainflowError.to_record`; an unknown class becomes an `InfrastructureError`."""
    # A newer version may have more classes; a failure of a worker is what it is in any case.
    cls = _CLASSES.get(str(record.get("class")), InfrastructureError)
    fields = {name: record.get(name) for name in ("field", "value", "remedy", "rank", "step", "details")}
    return cls(str(record.get("message", "No message was recorded.")), **fields)


def from_exception(error: BaseException, *, rank: int | None = None) -> TrainflowError:
    """Convert any exception to a typed failure: ours as it is, the user's as a `CodeError`.

    MemoryError and torch's out-of-memory errors become `OutOfMemoryError`, a full disk becomes `StorageFullError` and
    KeyboardInterrupt becomes `Interrupted`. `rank` is added where it is not known yet.
    """
    if isinstance(error, TrainflowError):
        error.rank = rank if error.rank is None else error.rank
        return error
    where: dict[str, Any] = {"rank": rank, "details": "".join(_traceback.format_exception(error))}
    # An assert without a message has an empty text.
    text = str(error) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Interrupted.", **where)
    if is_out_of_memory(error):
        remedy = "Lower per_device_train_batch_size; the global batch stays the same if global_batch_size is set."
        return OutOfMemoryError(f"Memory ran out: {text.splitlines()[0]}", remedy=remedy, **where)
    if is_full_disk(error):
        left = _free_bytes(error)
        message = f"No space left: {text}" if left is None else f"No space left, {left:,} bytes are free: {text}"
        return StorageFullError(message, remedy="Free space, or choose another storage.", **where)
    return without_temporary_folder(error) or CodeError(f"{type(error).__name__}: {text}", **where)


def without_temporary_folder(error: BaseException) -> StorageError | None:
    """Return the typed failure for a folder of temporary files that is not there (any more); None for another one."""
    if not isinstance(error, FileNotFoundError):
        return None
    place = os.environ.get("TMPDIR", "")
    if "No usable temporary directory" not in str(error):
        place = tempfile.gettempdir()
        if Path(place).is_dir() or not str(error.filename).startswith(place):
            return None
    message = "The folder for temporary files was removed, or cannot be written."
    remedy = "Make it again, or set TMPDIR to another folder; the same command continues."
    return StorageError(message, field="TMPDIR", value=place, remedy=remedy)


def is_full_disk(error: BaseException) -> bool:
    """Whether a disk or a quota is full, as Python or a library of another language reports it."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors, tokenizers: an error of Rust is not an OSError.
    return "(os error 28)" in str(error)


def _free_bytes(error: BaseException) -> int | None:
    """Bytes that are free where the file of an error was to be written; None where it names none."""
    name = getattr(error, "filename", None)
    if not isinstance(name, str):
        return None
    try:
        return shutil.disk_usage(os.path.dirname(name) or ".").free  # noqa: PTH120 (a name, not one of our paths)
    except OSError:
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device memory ran out, as Python, torch or a device library reports it."""
    # By name, because this module imports no torch.
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"}:
        return True
    text = str(error).lower()
    return "RuntimeError" in names and ("out of memory" in text or "can't allocate memory" in text)


# Classes of torch.distributed by name (no torch is imported here), and what gloo and NCCL write into a RuntimeError.
_LOST_CLASSES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_TIMEOUT_TEXTS = ("timed out waiting", "application timeout caused pair closure", "collective operation timeout")
_LOST_TEXTS = (
    *_TIMEOUT_TEXTS,
    *("connection closed by peer", "connection reset by peer", "broken pipe", "socket timeout"),
    *("gloo/transport", "gloo/rendezvous", "nccl error"),
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective raised `error`, or what it was raised from, because another rank is gone: not a cause."""
    if isinstance(error, TrainflowError):
        cause = error.__cause__
        return isinstance(error, InfrastructureError) and cause is not None and is_lost_peer(cause)
    if is_out_of_memory(error):  # NCCL reports it as its own error
        return False
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error).lower()
    return bool(names & _LOST_CLASSES) or ("RuntimeError" in names and any(sign in text for sign in _LOST_TEXTS))


def is_collective_timeout(error: BaseException) -> bool:
    """Return whether a collective waited in vain for a rank that is still there, as far as its error says."""
    if isinstance(error, TrainflowError):
        cause = error.__cause__
        return is_lost_peer(error) and cause is not None and is_collective_timeout(cause)
    return is_lost_peer(error) and any(sign in str(error).lower() for sign in _TIMEOUT_TEXTS)


def lost_peer_error(error: BaseException, *, rank: int) -> InfrastructureError | None:
    """Return the typed failure when a collective raised `error` because another rank is gone; None otherwise."""
    if isinstance(error, TrainflowError) or not is_lost_peer(error):
        return None
    what = f"Another process of this job ended or stopped answering: {first_line(error)}"
    return InfrastructureError(what, rank=rank, remedy="Look at the failure of the process that ended first.")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 300 characters; its class without one. Never empty.

    Clients of servers put whole responses into their errors, some of which begin with an empty line.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _shown(value: object, field: str) -> str:
    if is_secret(re.split(r"[. ]", field)[-1], value):
        return MASK
    text = mask(value if isinstance(value, str) else repr(value))
    # A value may be a whole data set.
    return text if len(text) <= 200 else text[:197] + "..."
