"""Loads a recipe: one Python file with the functions that prepare the data, build the model, feed it and measure it.

Only the first two functions are required::

    prepare(options, out) -> {split: rows}           out.info[...] = JSON; out.write_file(name, bytes)
    build_model(options, data) -> torch.nn.Module
    collate(rows) -> {name: Tensor}                  or collate(rows, data)
    compute_metrics(p: EvalPrediction) -> {name: float}      or compute_metrics(p, data)
    outcome_pairs(p) -> {"predictions": [...], "labels": [...]}      or outcome_pairs(p, data)
    preprocess_logits_for_metrics(logits, labels)
    compute_loss_func(outputs, labels, num_items_in_batch)
    callbacks(options) -> [TrainerCallback]
    prediction_columns(predictions, data) -> {column: sequence}
    after_evaluate(model, data, options) -> {"metrics": {name: float}, "files": {name: bytes}}
    class Trainer(trainer_lib.Trainer)

The file is loaded by its path under a private module name. Its project's root is appended to the module path, so a
project's folders do not hide installed packages.

The other modules of this package are recipes that a spec takes by name (`trainer_lib.protocol.recipe_names`), each a
file to copy; its packages have what several of them share. To replace a function of one, begin a file with
``from trainer_lib.recipes.NAME import *`` and define yours below. None of them does anything at import but define
names: keys follow into them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.protocol import recipe_functions
from trainer_lib.protocol.recipe_functions import OURS, kind_of, user_error
from trainer_lib.protocol.recipe_names import FOLDER
from trainer_lib.storage import FileEntry, Store

__all__ = [
    "DataInfo",
    "Hook",
    "PrepareOutput",
    "Recipe",
    "default_prediction_columns",
    "load",
    "refuse_hidden_packages",
]

REQUIRED = ("prepare", "build_model")
ASSETS = "assets"
MAX_FILE_BYTES = 1 << 30  # the largest file that read_file returns
T = TypeVar("T")
_PRIVATE_NAME = "_trainflow_recipe_"


class PrepareOutput:
    """The output of `prepare` besides rows: small JSON facts and small files (a tokenizer), stored next to the data.

    Attributes:
        info: JSON values, which other functions read as `DataInfo.info`; `new_columns` names columns that new rows may
            have in place of prepared ones, with their types; `summary` has sentences about the data, which are shown,
            and `unpublished` names of files that are not published with the model.
        warnings: sentences about what may be wrong with the data; they are shown, and no part of it.
        sources: the spec's `prepare.sources` in their order: local ones as absolute paths, wherever this runs.
        mixture: their names, where the spec mixes them: rows then have a column `source` with it; else empty.
    """

    def __init__(self, store: Store, sources: Sequence[str] = (), mixture: Sequence[str] = ()) -> None:
        self.info: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.sources: tuple[str, ...] = tuple(sources)
        self.mixture: tuple[str, ...] = tuple(mixture)
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
        """A copy of `info` as later stages read it: a tuple is a list. Raises DataError when a value is not JSON."""
        try:
            copied: dict[str, Any] = parse_json(json.dumps(self.info, allow_nan=False))
        except (TypeError, ValueError) as error:
            what = f"The values in out.info must be JSON ({error})."
            remedy = "Turn tensors and arrays into lists or numbers."
            raise DataError(what, field="prepare", remedy=remedy) from error
        return copied


class DataInfo:
    """The prepared data, for the functions of a recipe.

    Attributes:
        info: JSON values from `prepare`.
        splits: split -> number of rows.
        history: in `after_evaluate`, the log entries of the model's training (`TrainerState.log_history`); else empty.
        build_first: in `after_evaluate`, builds the model as it was before training; else None.
        url: folder of the prepare stage.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.info: dict[str, Any] = dict(data["info"])
        self.splits: dict[str, int] = {name: int(split["rows"]) for name, split in data["splits"].items()}
        self.history: list[dict[str, Any]] = []
        self.build_first: Callable[[], Any] | None = None
        self.url = str(data["url"])
        self._files = {str(file["path"]): file for file in data["files"]}
        self._made: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "build_first": None, "_made": {}}  # a data worker makes its own

    def once(self, name: str, make: Callable[[], T]) -> T:
        """The result of `make` when this process first asked for `name`: a tokenizer that all batches need."""
        if name not in self._made:
            self._made[name] = make()
        kept: T = self._made[name]
        return kept

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


class Recipe:
    """A loaded recipe. Errors of its code are raised as ours, with the traceback cut to the recipe's frames.

    `fallback` is the recipe with the functions that this file does not define. `collate`, `compute_metrics`,
    `preprocess_logits_for_metrics`, `compute_loss_func` and `after_evaluate` are None when neither defines them.
    """

    def __init__(
        self, module: ModuleType, path: Path, root: Path, needs: Collection[str], fallback: Recipe | None = None
    ) -> None:
        self.path, self.root, self.fallback = path, root, fallback
        self._module = module
        if self._find("metric_sums") is not None:
            raise recipe_functions.refuse_sums(field="recipe", value=str(path))
        for name in recipe_functions.CALLS:  # a missing function is reported before any work
            self._check(name, name in needs)
        self.collate = self._optional("collate")
        self.compute_metrics = self._optional("compute_metrics")
        self.preprocess_logits_for_metrics = self._optional("preprocess_logits_for_metrics")
        self.compute_loss_func = self._optional("compute_loss_func")
        self.after_evaluate = self._optional("after_evaluate")

    def _refuse(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(what, field="recipe", value=str(self.path), remedy=remedy)

    def _check(self, name: str, is_needed: bool) -> None:
        """Raise ConfigError for a function that is missing, no function, or takes other arguments."""
        function, instead = self._find(name), recipe_functions.INSTEAD.get(name)
        if function is not None and not callable(function):
            raise self._refuse(f"The name {name} is not a function in the recipe.", "Rename it.")
        if function is not None:
            recipe_functions.check_function(name, function, field="recipe", value=str(self.path))
        elif is_needed and (instead is None or self._find(instead) is None):
            raise self._refuse(f"The recipe has no function {name}().", f"Define {name}; examples show its signature.")

    @property
    def is_sharded(self) -> bool:
        """Whether the data is prepared source by source.

        Raises:
            ConfigError: the file defines both `prepare` and `prepare_shard`.
        """
        defined = [name for name in ("prepare", "prepare_shard") if callable(getattr(self._module, name, None))]
        if len(defined) == 2:
            what = "The recipe defines both prepare() and prepare_shard()."
            raise self._refuse(what, "Remove the one that is not used.")
        return defined == ["prepare_shard"] if defined or self.fallback is None else self.fallback.is_sharded

    def prepare(self, options: Mapping[str, Any], out: PrepareOutput) -> dict[str, Iterable[Mapping[str, Any]]]:
        """The rows of every split. Errors while rows are generated are raised as ours, too.

        Raises:
            DataError: the function did not return splits. CodeError: it raised an error.
        """
        return self._splits("prepare", options, out)

    def list_sources(self, options: Mapping[str, Any], out: PrepareOutput) -> list[Any]:
        """The sources, plain JSON each; without the function, those of the spec.

        Raises:
            DataError: there are none, one is there twice or is not JSON. CodeError: the function raised an error.
        """
        find = self._find("list_sources") or (lambda options, out: out.sources)
        with self.guarded():
            return recipe_functions.as_sources(find(options, out))

    def prepare_shard(self, source: Any, options: Mapping[str, Any]) -> dict[str, Iterable[Mapping[str, Any]]]:
        """The rows of every split that one source has; as `prepare`."""
        return self._splits("prepare_shard", source, options)

    def _splits(self, name: str, *args: Any) -> dict[str, Iterable[Mapping[str, Any]]]:
        with self.guarded():
            splits = recipe_functions.as_splits(name, self._find(name)(*args))
        return {split: self._guarded_rows(rows) for split, rows in splits.items()}

    def build_model(self, options: Mapping[str, Any], data: DataInfo) -> Any:
        """A new model, initialized from the present state of the random generators."""
        with self.guarded():
            return self._find("build_model")(options, data)

    def call(self, name: str) -> Any:
        """Call another function of the file without arguments; return its result. Raises ConfigError without one."""
        function = self._find(name)
        if not callable(function):
            what = f"The file has no function {name}()."
            raise ConfigError(what, field="model", value=str(self.path), remedy="Define it.")
        with self.guarded():
            return function()

    @property
    def has_callbacks(self) -> bool:
        """Whether the recipe has callbacks, which may add metrics."""
        return self._find("callbacks") is not None

    def callbacks(self, options: Mapping[str, Any]) -> list[Any]:
        """The recipe's callbacks; an empty list without any."""
        with self.guarded():
            return recipe_functions.as_list((self._find("callbacks") or (lambda _: []))(options))

    def prediction_columns(self, predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
        """The columns of a prediction file, one value per row, from model outputs ``[rows, …]``."""
        with self.guarded():
            find = self._find("prediction_columns") or default_prediction_columns
            return recipe_functions.as_columns(find(predictions, data))

    def collate_with(self, data: DataInfo) -> Callable[..., Any] | None:
        """The function `collate` as a Trainer calls it, with rows alone; `data` for one that takes it. None without."""
        return _given_data(self.collate, data)

    def compute_metrics_with(self, data: DataInfo) -> Callable[..., Any] | None:
        """The function `compute_metrics` as a Trainer calls it; `data` for one that takes it. None without."""
        return _given_data(self.compute_metrics, data)

    def outcome_pairs(self, given: EvalPrediction, data: DataInfo) -> dict[str, np.ndarray] | None:
        """The arrays that the function `outcome_pairs` makes of predictions and labels; None without it."""
        pairs = _given_data(self._optional("outcome_pairs"), data)
        if pairs is None:
            return None
        with self.guarded():
            return {name: np.asarray(values) for name, values in recipe_functions.as_pairs(pairs(given)).items()}

    def trainer_class(self, default: type) -> type:
        """The recipe's subclass of the Trainer; `default` without one."""
        # A recipe may also just import our Trainer, which is a subclass of itself.
        defined = self._find("Trainer")
        if isinstance(defined, type) and issubclass(defined, default):
            return defined
        if isinstance(defined, type) and defined.__module__.startswith(_PRIVATE_NAME):
            name = f"trainer_lib.{default.__name__}"
            what = f"The recipe's class Trainer does not derive from {name}, so it cannot train."
            raise self._refuse(what, f"Write class Trainer({name}), or give the class another name.")
        return default

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raise the errors of the user's code in a block as ours."""
        try:
            yield
        except (TrainflowError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            raise user_error(error, self.root) from error

    def _find(self, name: str) -> Any:
        """The value of `name` in the file, else in the file that it falls back to; None: there is none.

        A file that says ``collate = None`` has no collate, whatever the other one has.
        """
        if self.fallback is None or hasattr(self._module, name):
            return getattr(self._module, name, None)
        return self.fallback._find(name)

    def _optional(self, name: str) -> Callable[..., Any] | None:
        function = self._find(name)
        # An object with methods of its own (a metric of torchmetrics) is called by those.
        is_function = function is None or not hasattr(function, "update")
        return Hook(self, name, function) if function is not None and is_function else function

    def _guarded_rows(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        with self.guarded():
            # In a generator, because a recipe's rows may be one: its errors come while it is read.
            yield from rows


class Hook:
    """A function of a recipe whose errors are raised as ours. Pickled by name, for data workers that are spawned."""

    def __init__(self, recipe: Recipe, name: str, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._recipe, self._name, self._function = recipe, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        with self._recipe.guarded():
            result = self._function(*args, **kwargs)
            recipe_functions.check_result(self._name, result)
            return result

    def __reduce__(self) -> tuple[Any, ...]:
        other = self._recipe.fallback
        return _load_hook, (str(self._recipe.path), str(self._recipe.root), self._name, other and str(other.path))


def _given_data(function: Callable[..., Any] | None, data: DataInfo) -> Callable[..., Any] | None:
    if not isinstance(function, Hook) or "data" not in inspect.signature(function).parameters:
        return function
    return functools.partial(function, data=data)


def _load_hook(path: str, root: str, name: str, fallback: str | None) -> Any:
    return getattr(load(path, root, needs=(name,), fallback=fallback), name)


class _FromSource(SourceFileLoader):
    """Compiles a file as it is now: Python's stored bytecode misses an edit of equal size in the same second."""

    @override
    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load(
    path: str | Path, root: str | Path, *, needs: Collection[str] = REQUIRED, fallback: str | Path | None = None
) -> Recipe:
    """Load a recipe by its path.

    Args:
        path: the recipe's file.
        root: the project's root; it, its `src` and the recipe's folder are appended to the module path.
        needs: functions that the file, or the one it falls back to, must define.
        fallback: the file that has the functions which the first does not define.

    Raises:
        ConfigError: the file does not exist or lacks a function, or the project hides one of our packages.
        CodeError: the file raised an error while it was executed.
    """
    path, root = Path(path).resolve(), Path(root).resolve()
    if not path.is_file():
        remedy = "Give the path of recipe.py."
        raise ConfigError("There is no such file.", field="recipe", value=str(path), remedy=remedy)
    refuse_hidden_packages()
    for place in (root, root / "src", path.parent):
        if str(place) not in sys.path and place.is_dir() and place != FOLDER:
            # Appended, not inserted: the project must not hide our packages.
            sys.path.append(str(place))
    # A recipe may import keras, whose default backend is TensorFlow.
    os.environ.setdefault("KERAS_BACKEND", "torch")
    # By its path: two recipes called recipe.py must not share a module.
    name = f"{_PRIVATE_NAME}{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if path.suffix != ".py" or spec is None:
        what = "The recipe is not a Python file."
        raise ConfigError(what, field="recipe", value=str(path), remedy="Name it recipe.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up a class's module here
    try:
        loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except (Exception, SystemExit) as error:
        # Otherwise a second load in this process would find a module that is half executed.
        del sys.modules[name]
        raise user_error(error, root) from error
    other = None if fallback is None else load(fallback, root, needs=())
    return Recipe(module, path, root, needs, other)


def refuse_hidden_packages() -> None:
    """Raise ConfigError when `import trainflow` or `import trainer_lib` would find another package than ours."""
    home = Path(__file__).resolve().parents[2]
    for name in OURS:
        found = sys.modules.get(name)
        spec = found.__spec__ if found is not None else importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or []) if spec is not None else []
        origin = [spec.origin] if spec is not None and spec.origin else []
        # A namespace package has places and no origin, a plain module an origin and no places.
        for place in places or origin:
            if Path(place).resolve() != home / name:
                what = f"This folder hides trainflow's own package '{name}'."
                remedy = "Remove it from the front of the module path, or rename it."
                raise ConfigError(what, field="PYTHONPATH", value=place, remedy=remedy)


def default_prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """The best class and the scores of outputs ``[rows, classes]``; outputs of any other shape unchanged."""
    if predictions.ndim == 2 and predictions.shape[1] > 1:
        return {"prediction": predictions.argmax(axis=1), "scores": list(predictions)}
    return {"prediction": list(predictions)}
