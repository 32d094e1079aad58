"""A recipe: one Python file that says how a kind of model is prepared, built, fed and measured.

Plain functions; only the first two are required::

    prepare(options, out) -> {split: rows}           out.info[...] = JSON; out.write_file(name, bytes)
    build_model(options, data) -> torch.nn.Module
    collate(rows) -> {name: Tensor}
    compute_metrics(p: EvalPrediction) -> {name: float}
    preprocess_logits_for_metrics(logits, labels)
    compute_loss_func(outputs, labels, num_items_in_batch)
    callbacks(options) -> [TrainerCallback]
    prediction_columns(predictions, data) -> {column: sequence}
    after_evaluate(model, data, options) -> {"metrics": {name: float}, "files": {name: bytes}}
    class Trainer(trainer_lib.Trainer)

The file is loaded by its location under a private module name, and its project's root goes to the end of the module
path: a project may have folders called flows/ or tasks/ without getting in our way.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from trainer_lib.errors import CodeError, ConfigError, DataError, TrainflowError, from_exception
from trainer_lib.storage import FileEntry, Store

REQUIRED = ("prepare", "build_model")
OPTIONAL = (
    "collate",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "compute_loss_func",
    "callbacks",
    "prediction_columns",
    "after_evaluate",
)
OURS = ("flows", "tasks", "trainer_lib")
ASSETS = "assets"
FILE_BYTES = 1 << 30  # the largest single file that prepare may hand over in memory


class PrepareOutput:
    """What `prepare` gives besides rows: small JSON facts and small files (a tokenizer), kept beside the data.

    Attributes:
        info: JSON values, handed on as `DataInfo.info`.
    """

    def __init__(self, store: Store) -> None:
        self.info: dict[str, Any] = {}
        self._store = store
        self._files: dict[str, FileEntry] = {}

    def write_file(self, name: str, data: bytes) -> None:
        """Keep `data` under a relative name; `DataInfo.read_file(name)` returns it; a second call replaces it."""
        if not isinstance(data, bytes | bytearray):
            raise DataError(f"write_file takes bytes, got {type(data).__name__}.", field="prepare", value=name)
        entry = self._store.child(ASSETS).write_bytes(name, bytes(data))
        self._files[name] = FileEntry(f"{ASSETS}/{name}", entry.size, entry.sha256)

    def files(self) -> list[FileEntry]:
        """The files written so far, by path from the stage's folder."""
        return [self._files[name] for name in sorted(self._files)]

    def checked_info(self) -> dict[str, Any]:
        """`info` as it will be read back. DataError when it is not JSON."""
        try:
            copied: dict[str, Any] = json.loads(json.dumps(self.info, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"out.info must hold JSON values only ({error}).",
                field="prepare",
                remedy="Turn tensors and arrays into lists or numbers.",
            ) from error
        return copied


class DataInfo:
    """What a recipe knows of the prepared data: `info`, `splits` (name -> rows) and the files `prepare` wrote.

    Attributes:
        history: in `after_evaluate`, what the training that made the model logged (`TrainerState.log_history`).
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.info: dict[str, Any] = dict(data["info"])
        self.splits: dict[str, int] = {name: int(split["rows"]) for name, split in data["splits"].items()}
        self.history: list[dict[str, Any]] = []
        self.url = str(data["url"])
        self._files = {str(file["path"]): file for file in data["files"]}

    def read_file(self, name: str) -> bytes:
        """The bytes `prepare` wrote under `name`, checked against their digest. ConfigError when there is none."""
        known = self._files.get(f"{ASSETS}/{name}")
        if known is None:
            names = ", ".join(
                sorted(path.removeprefix(f"{ASSETS}/") for path in self._files if path.startswith(ASSETS))
            )
            raise ConfigError(
                "prepare wrote no such file.", field="recipe", value=name, remedy=f"It wrote: {names or '-'}."
            )
        data = Store.open(self.url).child(ASSETS).read_bytes(name, limit=FILE_BYTES)
        if hashlib.sha256(data).hexdigest() != known["sha256"]:
            raise DataError(
                "the file differs from the one prepare committed.", field=name, remedy="Run with --force prepare."
            )
        return data


class Recipe:
    """A loaded recipe with its defaults filled in. Whatever its code raises comes out typed, cut to its own frames.

    Attributes:
        path: the file. root: the project's root.
        collate, compute_metrics, preprocess_logits_for_metrics, compute_loss_func, after_evaluate: None when absent.
    """

    def __init__(self, module: ModuleType, path: Path, root: Path, needs: Collection[str]) -> None:
        self.path = path
        self.root = root
        self._module = module
        for name in (*REQUIRED, *OPTIONAL):
            function = getattr(module, name, None)
            if function is None and name in needs:
                raise ConfigError(
                    f"the recipe has no function {name}().",
                    field="recipe",
                    value=str(path),
                    remedy=f"Define {name}; the examples show its signature.",
                )
            if function is not None and not callable(function):
                raise ConfigError(f"{name} is not a function.", field="recipe", value=str(path), remedy="Rename it.")
        self.collate = self._optional("collate")
        self.compute_metrics = self._optional("compute_metrics")
        self.preprocess_logits_for_metrics = self._optional("preprocess_logits_for_metrics")
        self.compute_loss_func = self._optional("compute_loss_func")
        self.after_evaluate = self._optional("after_evaluate")

    def prepare(self, options: Mapping[str, Any], out: PrepareOutput) -> dict[str, Iterable[Mapping[str, Any]]]:
        """The rows of every split; errors raised while they are generated are typed as well."""
        with self.guarded():
            splits = self._module.prepare(options, out)
        if not isinstance(splits, Mapping) or not splits:
            raise DataError(
                f"prepare() must return a mapping from split names to rows, got {type(splits).__name__}.",
                field="recipe",
                value=str(self.path),
                remedy='Return for example {"train": rows, "validation": rows}.',
            )
        return {str(name): self._guarded_rows(rows) for name, rows in splits.items()}

    def build_model(self, options: Mapping[str, Any], data: DataInfo) -> Any:
        """The model, freshly initialised by the current random state."""
        with self.guarded():
            return self._module.build_model(options, data)

    def call(self, name: str) -> Any:
        """What a further function of the file returns, called without arguments. ConfigError when there is none."""
        function = getattr(self._module, name, None)
        if not callable(function):
            raise ConfigError(
                f"there is no function {name}() in it.", field="model", value=str(self.path), remedy="Define it."
            )
        with self.guarded():
            return function()

    def callbacks(self, options: Mapping[str, Any]) -> list[Any]:
        """The recipe's own callbacks."""
        function = getattr(self._module, "callbacks", None)
        with self.guarded():
            return list(function(options)) if function is not None else []

    def prediction_columns(self, predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
        """Columns for a file of predictions, from model outputs [rows, …]."""
        function = getattr(self._module, "prediction_columns", default_prediction_columns)
        with self.guarded():
            return dict(function(predictions, data))

    def trainer_class(self, default: type) -> type:
        """The recipe's own Trainer subclass, else `default`."""
        own = getattr(self._module, "Trainer", None)
        return own if isinstance(own, type) and issubclass(own, default) else default

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run the user's code: what it raises leaves as a typed failure."""
        try:
            yield
        except (TrainflowError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            raise user_error(error, self.root) from error

    def _optional(self, name: str) -> Callable[..., Any] | None:
        function = getattr(self._module, name, None)
        return None if function is None else Hook(self, name, function)

    def _guarded_rows(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        with self.guarded():
            yield from rows


class Hook:
    """A function of a recipe: same signature, typed failures. Picklable by name, for data workers that are spawned."""

    def __init__(self, recipe: Recipe, name: str, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._recipe, self._name, self._function = recipe, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        with self._recipe.guarded():
            return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_hook, (str(self._recipe.path), str(self._recipe.root), self._name)


def _load_hook(path: str, root: str, name: str) -> Any:
    return getattr(load(path, root, needs=(name,)), name)


def load(path: str | Path, root: str | Path, *, needs: Collection[str] = REQUIRED) -> Recipe:
    """Load a recipe by its location. `needs`: the functions it must have; a stage's own file has that stage's only.

    Raises:
        ConfigError: no such file, a required function is missing, or our packages are shadowed by the project's.
        CodeError: the file raised while it was executed.
    """
    path, root = Path(path).resolve(), Path(root).resolve()
    if not path.is_file():
        raise ConfigError(
            "there is no such file.", field="recipe", value=str(path), remedy="Give the path of recipe.py."
        )
    assert_ours()
    if str(root) not in sys.path:
        sys.path.append(str(root))
    name = f"_trainflow_recipe_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError("is not a Python file.", field="recipe", value=str(path), remedy="Name it recipe.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling by worker processes look a class's module up
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise user_error(error, root) from error
    return Recipe(module, path, root, needs)


def absent(root: Path) -> Recipe:
    """A recipe without functions, for what needs none."""
    return Recipe(ModuleType("_trainflow_no_recipe"), root, root, ())


def assert_ours() -> None:
    """Make sure that `import flows` and so on mean this distribution. ConfigError naming the file in the way."""
    home = Path(__file__).resolve().parents[1]
    for name in OURS:
        found = sys.modules.get(name)
        spec = found.__spec__ if found is not None else importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or []) if spec is not None else []
        origin = [spec.origin] if spec is not None and spec.origin else []
        for place in places or origin:
            if Path(place).resolve() != home / name:
                raise ConfigError(
                    f"hides trainflow's own package '{name}'.",
                    field="PYTHONPATH",
                    value=place,
                    remedy="Take its folder off the front of the module path, or rename it.",
                )


def default_prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Two dimensions [rows, classes]: the best class and the scores; otherwise the outputs as they are."""
    if predictions.ndim == 2 and predictions.shape[1] > 1:
        return {"prediction": predictions.argmax(axis=1), "scores": list(predictions)}
    return {"prediction": list(predictions)}


def user_error(error: BaseException, root: Path) -> TrainflowError:
    """The typed failure for what user code raised: message with file and line, `details` cut to the user's frames."""
    if isinstance(error, SystemExit):
        typed: TrainflowError = CodeError(f"the recipe ended the process: sys.exit({error.code!r}).")
    else:
        typed = from_exception(error)
    if _FROM_DATA_WORKER.match(typed.message):
        typed.message, typed.details = typed.message.strip().splitlines()[-1], typed.message
    if not isinstance(typed, CodeError) or typed.value is not None:
        return typed
    frames = [frame for frame in _frames(error) if _is_users(frame.filename, root)]
    if frames:
        typed.field, typed.value = "recipe", f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
        lines = [*traceback.format_list(frames), f"{typed.message}\n"]
        typed.details = "Traceback (most recent call last):\n" + "".join(lines)
        typed.remedy = "Fix the recipe; --debug shows the traceback." + _hint(error, root)
    else:
        typed.remedy = "It was not raised in the recipe's own code; --debug shows where."
    return typed


# How torch re-raises what happened in a data worker: the traceback is inside the message.
_FROM_DATA_WORKER = re.compile(r"(\w+: )?Caught \w+ in DataLoader worker process")
_FRAME_LINE = re.compile(r'^  File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where it was raised, outermost first: from the traceback, the syntax error, or a data worker's message."""
    if isinstance(error, SyntaxError) and error.filename:
        return [traceback.FrameSummary(error.filename, error.lineno, "the file itself")]
    found = list(traceback.extract_tb(error.__traceback__))
    text = str(error)
    if _FROM_DATA_WORKER.match(text):
        found += [traceback.FrameSummary(file, int(line), name) for file, line, name in _FRAME_LINE.findall(text)]
    return found


def _is_users(filename: str, root: Path) -> bool:
    """Below the project's root, but neither ours nor an installed package (a virtual environment may lie inside it)."""
    path = Path(filename)
    if not path.is_absolute() or not path.is_relative_to(root):
        return False
    ours = Path(__file__).resolve().parents[1]
    return not {"site-packages", "dist-packages"} & set(path.parts) and not any(
        path.is_relative_to(ours / name) for name in OURS
    )


def _hint(error: BaseException, root: Path) -> str:
    """For a failed import of a module that is named like one of our packages: say whose was found."""
    name = (getattr(error, "name", None) or "").split(".")[0]
    if isinstance(error, ImportError) and name in OURS and ((root / name).exists() or (root / f"{name}.py").exists()):
        return f" (`import {name}` means trainflow's package, not {root / name}: rename yours.)"
    return ""
