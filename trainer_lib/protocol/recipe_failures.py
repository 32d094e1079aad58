"""The errors of a recipe's own code as ours: where they were raised, and the traceback cut to the user's frames.

A file that is gone is not an error of the code: `vanished_source` recognizes it.
"""

from __future__ import annotations

import errno
import importlib.metadata
import re
import traceback
from pathlib import Path

from trainer_lib.errors import CodeError, DataError, MissingExtraError, TrainflowError, first_line, from_exception

OURS = ("trainer_lib", "trainflow")


def user_error(error: BaseException, root: Path) -> TrainflowError:
    """Our error for one of the user's code: `value` has file and line, `details` the traceback's user frames."""
    if isinstance(error, SystemExit):
        typed: TrainflowError = CodeError(f"The recipe ended the process with sys.exit({error.code!r}).")
    else:
        typed = _missing_extra(error) or from_exception(error)
    if _FROM_DATA_WORKER.match(typed.message):
        # The last line is the error, the rest the worker's traceback.
        typed.message, typed.details = typed.message.strip().splitlines()[-1], typed.message
    if not isinstance(typed, CodeError) or typed.value is not None:
        return typed
    frames = [frame for frame in _list_frames(error) if _is_users(frame.filename, root)]
    if frames:
        typed.field, typed.value = "recipe", f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
        lines = [*traceback.format_list(frames), f"{typed.message}\n"]
        typed.details = "Traceback (most recent call last):\n" + "".join(lines)
        typed.remedy = "Fix the recipe; --debug shows the traceback." + _hint_at_import(error, root)
    else:
        typed.remedy = "The error was not raised in the recipe's own code; --debug shows where."
    return typed


def _missing_extra(error: BaseException) -> MissingExtraError | None:
    """Our error for a package that is not installed and that an extra of trainflow brings; None for any other."""
    name = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else None
    wanted = {"PIL": "pillow", "sklearn": "scikit-learn"}.get(name or "", (name or "").replace("_", "-"))
    for line in importlib.metadata.requires("trainflow") or ():
        brought = re.match(rf"{re.escape(wanted)}(?![\w.-]).*extra == ['\"]([\w-]+)", line, re.IGNORECASE)
        if wanted and brought:
            what = f"The recipe imports {name}, which is not installed."
            return MissingExtraError(what, extra=brought[1], field="recipe")
    return None


# torch re-raises the error of a data worker with the traceback inside the message.
_FROM_DATA_WORKER = re.compile(r"(\w+: )?Caught \w+ in DataLoader worker process")
_FRAME_LINE = re.compile(r'^  File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)


def _list_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The error's frames, outermost first: from the traceback, a syntax error, or a data worker's message."""
    if isinstance(error, SyntaxError) and error.filename:
        return [traceback.FrameSummary(error.filename, error.lineno, "the file itself")]
    found = list(traceback.extract_tb(error.__traceback__))
    text = str(error)
    if _FROM_DATA_WORKER.match(text):
        found += [traceback.FrameSummary(file, int(line), name) for file, line, name in _FRAME_LINE.findall(text)]
    return found


def _is_users(filename: str, root: Path) -> bool:
    """Whether a file lies below the project's root and is neither ours nor an installed package."""
    path = Path(filename)
    if not path.is_absolute() or not path.is_relative_to(root):
        return False
    ours = Path(__file__).resolve().parents[2]
    return not {"site-packages", "dist-packages"} & set(path.parts) and not any(
        path.is_relative_to(ours / name) for name in OURS
    )


def _hint_at_import(error: BaseException, root: Path) -> str:
    """A hint for a failed import: a module of the project that has the name of our package, or a missing one."""
    name = (getattr(error, "name", None) or "").split(".")[0]
    if isinstance(error, ImportError) and name in OURS and ((root / name).exists() or (root / f"{name}.py").exists()):
        return f" (`import {name}` means trainflow's package, not {root / name}: rename yours.)"
    if isinstance(error, ModuleNotFoundError) and name:
        return f" (Modules are found in {root}, its src, the recipe's folder, and where packages are installed.)"
    return ""


def vanished_source(error: TrainflowError, shown: str) -> DataError | None:
    """Return our error where a file was not there while a source was read; None where another thing failed.

    Args:
        error: what `user_error` made of the recipe's error.
        shown: the source's text.
    """
    cause = error.__cause__ if isinstance(error, CodeError) else None
    while cause is not None:  # a reader of another package may wrap it
        # By the number as well: a store's client may raise a class of its own.
        if isinstance(cause, FileNotFoundError) or (isinstance(cause, OSError) and cause.errno == errno.ENOENT):
            return DataError(
                f"A file does not exist that prepare_shard() reads for this source ({first_line(cause)}).",
                field="prepare_shard",
                value=shown,
                remedy="Restore it, or leave the source out of the list, and run the command again.",
                details=error.details,
            )
        cause = cause.__cause__
    return None
