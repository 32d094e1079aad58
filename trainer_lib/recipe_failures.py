"""The errors of a recipe's own code as ours: where they were raised, and the traceback cut to the user's frames."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from trainer_lib.errors import CodeError, TrainflowError, from_exception

OURS = ("flows", "tasks", "trainer_lib")


def user_error(error: BaseException, root: Path) -> TrainflowError:
    """Our error for one of the user's code: `value` has file and line, `details` the traceback's user frames."""
    if isinstance(error, SystemExit):
        typed: TrainflowError = CodeError(f"The recipe ended the process with sys.exit({error.code!r}).")
    else:
        typed = from_exception(error)
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
        typed.remedy = "Fix the recipe; --debug shows the traceback." + _hint_at_hidden_package(error, root)
    else:
        typed.remedy = "The error was not raised in the recipe's own code; --debug shows where."
    return typed


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
    ours = Path(__file__).resolve().parents[1]
    return not {"site-packages", "dist-packages"} & set(path.parts) and not any(
        path.is_relative_to(ours / name) for name in OURS
    )


def _hint_at_hidden_package(error: BaseException, root: Path) -> str:
    """A hint for a failed import: the project's module has the name of one of our packages."""
    name = (getattr(error, "name", None) or "").split(".")[0]
    if isinstance(error, ImportError) and name in OURS and ((root / name).exists() or (root / f"{name}.py").exists()):
        return f" (`import {name}` means trainflow's package, not {root / name}: rename yours.)"
    return ""
