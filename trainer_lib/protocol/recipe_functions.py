"""Calls of a recipe's functions and their results: a mistake is a sentence that names the function.

An error of a recipe's own code becomes ours (`user_error`): where it was raised, and the traceback cut to the user's
frames. A file that is gone is not an error of the code: `vanished_source` recognizes it.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import importlib.metadata
import inspect
import json
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import (
    CodeError,
    ConfigError,
    DataError,
    MissingExtraError,
    TrainflowError,
    first_line,
    from_exception,
)

CALLS: Mapping[str, tuple[str, ...]] = {
    "prepare": ("options", "out"),
    "list_sources": ("options", "out"),
    "prepare_shard": ("source", "options"),
    "build_model": ("options", "data"),
    "collate": ("rows",),
    "compute_metrics": ("p",),
    "outcome_pairs": ("p",),
    "preprocess_logits_for_metrics": ("logits", "labels"),
    "compute_loss_func": ("outputs", "labels"),
    "callbacks": ("options",),
    "prediction_columns": ("predictions", "data"),
    "after_evaluate": ("model", "data", "options"),
}
"""Function -> what it is called with, by position. Some may take one more, by the name in `LAST`."""
INSTEAD: Mapping[str, str] = {"prepare": "prepare_shard"}
"""Required function -> the one that a recipe may define instead."""
LAST = {
    "compute_loss_func": "num_items_in_batch",
    "collate": "data",
    "compute_metrics": "data",
    "outcome_pairs": "data",
}
OURS = ("trainer_lib", "trainflow")
# torch re-raises the error of a data worker with the traceback inside the message.
_FROM_DATA_WORKER = re.compile(r"(\w+: )?Caught \w+ in DataLoader worker process")
_FRAME_LINE = re.compile(r'^  File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)


def check_signature(name: str, signature: inspect.Signature, *, field: str, value: str) -> None:
    """Raise ConfigError, about the file `value` in `field`, for a function that cannot be called as `CALLS` says."""
    given, last = CALLS[name], LAST.get(name)
    for keywords in ({}, {last: None}) if last else ({},):
        with contextlib.suppress(TypeError):
            signature.bind(*given, **keywords)
            return
    # `data` is for those that need it, and most do not.
    wanted = ", ".join((*given, last) if last and last != "data" else given)
    shown = signature.replace(return_annotation=inspect.Signature.empty)
    what, remedy = f"{name}{shown} cannot be called as {name}({wanted}).", f"Define it as def {name}({wanted})."
    raise ConfigError(what, field=field, value=value, remedy=remedy)


def refuse_sums(*, field: str, value: str) -> ConfigError:
    """The error of a recipe with `metric_sums`, which an earlier trainflow called to measure ranges of rows."""
    remedy = (
        "Define it as def compute_metrics(p), or as an object with update, compute and reset that keeps no outputs."
    )
    return ConfigError("metric_sums() of a recipe is not called any more.", field=field, value=value, remedy=remedy)


def check_function(name: str, function: Callable[..., Any], *, field: str, value: str) -> None:
    """Check a loaded function as `check_signature` does; one whose signature cannot be known passes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    check_signature(name, signature, field=field, value=value)


def check_definitions(tree: ast.Module, *, field: str, value: str) -> None:
    """Check the functions that a recipe's file defines, without running it; decorated ones may take anything."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            continue
        if node.name == "metric_sums":
            raise refuse_sums(field=field, value=value)
        if node.name in CALLS:
            check_signature(node.name, _signature_of(node.args), field=field, value=value)


def find_returned_names(tree: ast.Module, name: str) -> list[str] | None:
    """The keys of the mappings that a file's function returns; None where they are known only when it runs."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(found) != 1 or found[0].decorator_list:
        return None
    names: dict[str, None] = {}
    nodes: list[ast.AST] = list(found[0].body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Return):
            keys = node.value.keys if isinstance(node.value, ast.Dict) else [None]
            for key in keys:
                if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                    return None
                names[key.value] = None
        nodes += ast.iter_child_nodes(node)
    return list(names) or None


def _signature_of(args: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    positional: list[tuple[ast.arg, Any]] = [(arg, kinds.POSITIONAL_ONLY) for arg in args.posonlyargs]
    positional += [(arg, kinds.POSITIONAL_OR_KEYWORD) for arg in args.args]
    required = len(positional) - len(args.defaults)
    parameters = [kinds(arg.arg, kind) for arg, kind in positional[:required]]
    parameters += [kinds(arg.arg, kind, default=None) for arg, kind in positional[required:]]
    parameters += [kinds(args.vararg.arg, kinds.VAR_POSITIONAL)] if args.vararg else []
    for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(kinds(arg.arg, kinds.KEYWORD_ONLY, default=kinds.empty if value is None else None))
    parameters += [kinds(args.kwarg.arg, kinds.VAR_KEYWORD)] if args.kwarg else []
    return inspect.Signature(parameters)


# -- what they return -------------------------------------------------------------------------------------------------


def kind_of(value: object) -> str:
    """Name the kind of a value as its user would: "None", "a list"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def wrong_result(name: str, wanted: str, value: object, *, remedy: str) -> ConfigError:
    """Return the error for a function that returned `value` in place of `wanted`."""
    what = f"The function {name}() must return {wanted}, and returned {kind_of(value)}."
    return ConfigError(what, field=name, remedy=remedy)


def check_result(name: str, value: object) -> None:
    """Raise ConfigError unless `collate` returned a batch, or `compute_loss_func` a tensor with a gradient."""
    if name == "collate" and value is None:
        remedy = 'Return for example {"x": tensor, "labels": tensor}.'
        raise wrong_result(name, "a mapping of names to tensors", value, remedy=remedy)
    if name == "compute_loss_func" and not hasattr(value, "backward"):
        remedy = "Return the tensor itself, without item() or float()."
        raise wrong_result(name, "the loss as a tensor", value, remedy=remedy)


def as_splits(name: str, value: object) -> dict[str, Iterable[Mapping[str, Any]]]:
    """Return the result of `prepare` or `prepare_shard`. Raises DataError unless it maps splits to rows."""
    if not isinstance(value, Mapping) or not value:
        what = f"The function {name}() must return a mapping from split names to rows, not {kind_of(value)}."
        remedy = 'Return for example {"train": rows, "validation": rows}.'
        raise DataError(what, field="recipe", value=name, remedy=remedy)
    for split, rows in value.items():
        if not isinstance(rows, Iterable):
            what = f"The function {name}() returned {kind_of(rows)} for the split '{split}', which has no rows."
            raise DataError(what, field="recipe", value=name, remedy="Return a list or another iterable of rows.")
    return {str(split): rows for split, rows in value.items()}


def as_sources(value: object) -> list[Any]:
    """Return the result of `list_sources`. Raises DataError unless it is a list of JSON values, all different."""
    remedy = (
        'Return for example ["s3://bucket/a.parquet", "s3://bucket/b.parquet"], or {"file": ..., "rows": [0, 1000]}.'
    )
    if not isinstance(value, list | tuple) or not value:
        what = "no sources" if isinstance(value, list | tuple) else f"{kind_of(value)}, not a list"
        raise DataError(f"The function list_sources() returned {what}.", field="list_sources", remedy=remedy)
    seen: set[str] = set()
    for source in value:
        try:
            text = json.dumps(source, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            what = f"A source must be JSON ({error})."
            raise DataError(what, field="list_sources", value=source, remedy=remedy) from error
        if text in seen:
            raise DataError("A source is listed twice.", field="list_sources", value=text, remedy="List it once.")
        seen.add(text)
    # Through JSON, so that a run which continues compares the same values.
    return [parse_json(json.dumps(source)) for source in value]


def as_list(value: object) -> list[Any]:
    """Return the result of `callbacks` as a list. Raises ConfigError for anything else."""
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise wrong_result("callbacks", "a list of callbacks", value, remedy="Return [] for none.")
    return list(value)


def as_columns(value: object) -> dict[str, Any]:
    """Return the result of `prediction_columns`. Raises ConfigError unless it maps names to columns with a length."""
    remedy = 'Return for example {"prediction": predictions.argmax(axis=1)}.'
    if not isinstance(value, Mapping):
        raise wrong_result("prediction_columns", "a mapping of names to columns", value, remedy=remedy)
    for name, column in value.items():
        if not hasattr(column, "__len__") or isinstance(column, str):
            wanted = f"one value per row for '{name}'"
            raise wrong_result("prediction_columns", wanted, column, remedy=remedy)
    return dict(value)


def as_pairs(value: object) -> dict[str, Any]:
    """Return the result of `outcome_pairs`. Raises ConfigError unless it has predictions and labels of one length."""
    remedy = 'Return {"predictions": guesses, "labels": truth, "rows": row_of_each}, arrays of one length.'
    known = {"predictions", "labels", "rows", "confidence"}
    if not isinstance(value, Mapping) or not {"predictions", "labels"} <= set(value) <= known:
        raise wrong_result("outcome_pairs", "predictions and labels by name", value, remedy=remedy)
    lengths = {str(name): len(column) for name, column in value.items()}
    if len(set(lengths.values())) > 1:
        what = "outcome_pairs() returned arrays of different lengths."
        raise ConfigError(what, field="outcome_pairs", value=lengths, remedy=remedy)
    return dict(value)


def as_measurements(value: object) -> tuple[dict[str, float], dict[str, bytes]]:
    """The numbers and the files of what `after_evaluate` returned. Raises ConfigError."""
    remedy = 'Return {"metrics": {name: number}, "files": {name: bytes}}.'
    parts = value if isinstance(value, Mapping) else {}
    inner = {name: parts.get(name, {}) for name in ("metrics", "files")}
    unknown = sorted(set(parts) - set(inner))
    if unknown:
        raise ConfigError("after_evaluate() returned unknown keys.", field="recipe", value=unknown, remedy=remedy)
    if not isinstance(value, Mapping) or not all(isinstance(part, Mapping) for part in inner.values()):
        raise wrong_result("after_evaluate", "metrics and files by name", value, remedy=remedy)
    metrics: dict[str, float] = {}
    files: dict[str, bytes] = {}
    for name, content in inner["files"].items():
        if not isinstance(content, bytes | bytearray | str):
            raise wrong_result("after_evaluate", f"bytes or text for the file '{name}'", content, remedy=remedy)
        files[str(name)] = content.encode() if isinstance(content, str) else bytes(content)
    for name, number in inner["metrics"].items():
        try:
            metrics[str(name)] = float(number)
        except (TypeError, ValueError):
            raise wrong_result("after_evaluate", f"a number for '{name}'", number, remedy=remedy) from None
    return metrics, files


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
    """Our error where a file was not there while the source `shown` was read; None where another thing failed.

    `error`: what `user_error` made of the recipe's error.
    """
    cause = error.__cause__ if isinstance(error, CodeError) else None
    while cause is not None:  # a reader of another package may wrap it
        # By the number as well: a store's client may raise a class of its own.
        if isinstance(cause, FileNotFoundError) or (isinstance(cause, OSError) and cause.errno == errno.ENOENT):
            what = f"A file does not exist that prepare_shard() reads for this source ({first_line(cause)})."
            remedy = "Restore it, or leave the source out of the list, and run the command again."
            return DataError(what, field="prepare_shard", value=shown, remedy=remedy, details=error.details)
        cause = cause.__cause__
    return None
