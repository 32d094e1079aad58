"""`load_model`: a trained model from its address, ready to predict new rows."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from trainer_lib import recipes
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.base.records import to_record
from trainer_lib.checkpoint.reader import open_checkpoint
from trainer_lib.data.loading.generators import keep_generators
from trainer_lib.data.rows.given_rows import GivenRows, in_order
from trainer_lib.errors import CodeError, ConfigError, DamagedError
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.evaluation_loop import stream_predictions
from trainer_lib.evaluation.prediction_spool import PredictionSpool
from trainer_lib.launch.run_dir import MARK
from trainer_lib.model_folder.description import ModelDescription
from trainer_lib.model_folder.locate import FIELD, FoundModel, find_model, require_trust, require_weights
from trainer_lib.protocol import requests
from trainer_lib.protocol.recipe_names import KEPT, installed_recipe
from trainer_lib.recipes.tables.table_files import TableForm
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer
from trainer_lib.storage import FileEntry, Store
from trainer_lib.worker.predict import single_output
from trainer_lib.worker.process.assembly import arguments, build_model, build_trainer, load_tensors, load_weights
from trainer_lib.worker.process.session import Events, Work

if TYPE_CHECKING:
    from pandas import DataFrame

_log = logging.getLogger(__name__)


class LoadedModel:
    """A trained model with the functions of its recipe.

    Attributes:
        model: the module with its trained weights, in evaluation mode.
        collate: the recipe's, or None: rows -> batch, a mapping from names to tensors ``[batch, ...]``.
        form: how new rows are read, where the model was trained on a table; None: they have the prepared types.
        description: what the model consists of.
        url: where it was loaded from.
        digest: SHA-256 of all that decides the predictions.
    """

    def __init__(self, work: Work[requests.PredictRequest], found: FoundModel) -> None:
        self.description = found.description
        self.url = found.url
        self.digest = found.digest()
        self._work = work
        self._data = recipes.DataInfo(to_record(work.request.data))
        self.collate = work.recipe.collate_with(self._data)
        self.form = TableForm.of(self.description.info)
        self._args = arguments(work, "predict", work.request.output)
        with keep_generators():  # building draws the initial weights, which the trained ones replace
            self.model: nn.Module = build_model(work, self._args, self._data)
        self._trainer: Any = None

    def predict(
        self, rows: Iterable[Mapping[str, Any]] | DataFrame, *, batch_size: int | None = None
    ) -> dict[str, Sequence[Any]]:
        """Predict rows that are not prepared data: what the predict stage would write for them.

        Args:
            rows: a DataFrame, or mappings with the columns of the prepared data, labels left out; lists stand for
                arrays. Those of a recipe for tables may have what its files had: gaps, numbers as texts, columns that
                training left out.
            batch_size: rows of a forward pass; default: the training's `per_device_eval_batch_size`.

        Returns:
            Column -> values of the rows: what the recipe's `prediction_columns` makes of the model's outputs.

        Raises:
            DataError: a row has an unknown column, lacks one, or has a value of another type.
        """
        with contextlib.closing(PredictionSpool(None)) as spool:
            self.add_outputs(self.typed(rows), spool, batch_size=batch_size)
            return self.columns_of(spool)

    def typed(self, rows: Any) -> GivenRows:
        """Rows as for `predict`, with the types of prepared ones."""
        if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a DataFrame, whose iteration gives its columns
            rows = rows.to_dict("records")
        if (form := self.form) is not None:
            form.unknown.clear()  # of earlier rows
            rows = [
                form.read(row, f"Row {number}") if isinstance(row, Mapping) else row for number, row in enumerate(rows)
            ]
            for sentence in form.describe_unknown():
                _log.warning("%s", sentence)
        return GivenRows(rows, self.description.columns)

    def measured_with(self, rows: Sequence[Mapping[str, Any]], labels: np.ndarray) -> EvalPrediction:
        """The input of the recipe's metrics, from rows as for `predict` and their labels ``[rows]``."""
        with contextlib.closing(PredictionSpool(None)) as spool:
            self.add_outputs(self.typed(rows), spool)
            return EvalPrediction(nested.map_tree(np.array, spool.tree()), labels)  # the spool's files go

    def outcomes_of(
        self, given: EvalPrediction, names: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """The outcomes of rows with these names by `given`, of `measured_with`; None for outputs of another kind."""
        from trainer_lib.worker.evaluate import pair_outcomes, summarize_pairs

        pairs = pair_outcomes(self._work.recipe, given, self._data)
        return summarize_pairs(pairs, self._data, id_of=names.__getitem__, show=rows.__getitem__)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the recipe keeps; None without one."""
        return kept_tokenizer(self._data) if self.description.info.get("tokenizer") else None

    @property
    def device(self) -> torch.device:
        """The device that predictions are made on."""
        return self._args.device

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer that the recipe keeps into a folder; nothing without one."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    @property
    def compute_metrics(self) -> Callable[..., Any] | None:
        """The recipe's function; None without one."""
        return self._work.recipe.compute_metrics_with(self._data)

    @property
    def batch_size(self) -> int:
        """Rows of a forward pass, unless a call asks for others."""
        return int(self._args.per_device_eval_batch_size)

    def add_outputs(self, rows: GivenRows, spool: PredictionSpool, *, batch_size: int | None = None) -> None:
        """Append outputs for rows to a spool: arrays ``[batch, …]``. Raises ConfigError if a batch has no rows."""
        if batch_size is not None and batch_size < 1:
            raise ConfigError("A batch has at least one row.", field="batch_size", value=batch_size)
        if self._trainer is None:
            with keep_generators():  # a Trainer seeds them
                self._trainer = build_trainer(self._work, self._args, self.model, [])
        args = self._trainer.args
        usual = args.per_device_eval_batch_size
        args.per_device_eval_batch_size = usual if batch_size is None else batch_size
        try:
            for _, outputs in stream_predictions(self._trainer, rows, start=0, stop=len(rows)):
                spool.append(outputs)
        finally:
            args.per_device_eval_batch_size = usual

    def columns_of(self, spool: PredictionSpool, order: Sequence[int] | None = None) -> dict[str, Sequence[Any]]:
        """The columns that the recipe's `prediction_columns` makes of the outputs in a spool, one for every row.

        `order`: the places of the rows that the outputs are of; None: they are in the rows' order.
        """
        tree = spool.tree() if order is None else nested.map_tree(partial(in_order, order=order), spool.tree())
        return self._work.recipe.prediction_columns(single_output(tree), self._data)


def load_model(address: str, *, trust_code: bool | str = False) -> LoadedModel:
    """Load a trained model: of a run, a train stage, a checkpoint, or a publication (`model_folder.locate`).

    A model's recipe is Python code, and loading the model executes it. The code of a run on a storage of yours is
    executed as the run executed it. Code that was published is executed only if you trust it.

    Args:
        address: a folder or URL, or ``hf://organisation/name``.
        trust_code: execute published code: True, or the SHA-256 of the code that you have read.

    Raises:
        ConfigError: there is no model, its code is not trusted, or it needs a package that is not installed.
        DamagedError: a file differs from what its description lists; nothing of it is executed or loaded.
        StorageError: the address cannot be read.
    """
    found = find_model(address)
    require_trust(found, trust_code)
    require_weights(found)
    description = found.description
    _log.info("The code of %s is executed (SHA-256 %s).", found.url, description.code_digest)
    folder = _fetch_code(found)
    for entry in description.weights if found.checkpoint is None else ():
        if not found.weights.exists(entry.path) or found.weights.digest(entry.path) != entry.sha256:
            raise _damaged(found.weights, entry)
    recipe, fallback = (
        path and (installed_recipe(path) or str(folder / path)) for path in (description.recipe, description.fallback)
    )
    recipe_file = requests.RecipeFile(str(recipe), str(folder), fallback)
    splits = {name: requests.PreparedSplit(count) for name, count in description.rows.items()}
    request = requests.PredictRequest(
        output=tempfile.gettempdir(),  # nothing is written there
        recipe=recipe_file,
        options=description.options,
        data=requests.PreparedData(found.data.url, splits, description.info, description.assets),
        model=description.model,
        args={**description.args, "report_to": "none"},
        model_url=found.weights.url,
        split="",
    )
    with _naming_packages(description):
        work = Work(request, _load_recipe(recipe_file, description), 0, 1, Events(Path(), 0, lambda event: None))
        loaded = LoadedModel(work, found)
    if found.checkpoint is None:
        load_weights(loaded.model, found.weights.url)
    else:
        tensors = open_checkpoint(found.checkpoints, found.checkpoint).read_model()
        load_tensors(loaded.model, tensors, f"{found.checkpoints.url}/{found.checkpoint}")
    loaded.model.eval()
    return loaded


def load_same(request: requests.ScoreRequest | requests.MeasureRowsRequest) -> LoadedModel:
    """Load the model of a request. Raises ConfigError when it is not the one that the command has looked at."""
    loaded = load_model(request.model, trust_code=request.code)
    if loaded.digest != request.digest:
        what = "The model was replaced while the command began."
        raise ConfigError(what, field="MODEL", value=request.model, remedy="Run it again.")
    return loaded


_FETCHED: dict[str, Path] = {}  # digest of code -> its folder in this process, removed when the process ends


def _fetch_code(found: FoundModel) -> Path:
    """A private copy of the code, every byte compared: what is executed is what was digested."""
    digest = found.description.code_digest
    if digest in _FETCHED:
        return _FETCHED[digest]
    contents: dict[str, bytes] = {}
    for entry in found.description.code:
        if not found.code.exists(entry.path) or found.code.size(entry.path) != entry.size:
            raise _damaged(found.code, entry)
        contents[entry.path] = found.code.read_bytes(entry.path, limit=entry.size)
        if hashlib.sha256(contents[entry.path]).hexdigest() != entry.sha256:
            raise _damaged(found.code, entry)
    # In a worker, below the folder of its launch, which the owner removes however the worker ends.
    launched = os.environ.get(MARK, "")
    above = launched if launched and Path(launched).is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="trainflow-code-", dir=above))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    _FETCHED[digest] = folder
    return folder


def _damaged(store: Store, entry: FileEntry) -> DamagedError:
    what = "The file is missing, or differs from what the model's description lists."
    return DamagedError(what, field=store.url, value=entry.path, remedy="Copy or publish the model again.")


@contextlib.contextmanager
def _naming_packages(description: ModelDescription) -> Iterator[None]:
    """Raise ConfigError where the model's code imports, anywhere, a package that is not installed."""
    try:
        yield
    except CodeError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        made = ", ".join(f"{package} {version}" for package, version in sorted(description.versions.items()))
        what = f"The model's code needs the package {cause.name}, which is not installed."
        remedy = f"Install it. The model was made with {made}." if made else "Install it."
        raise ConfigError(what, field=FIELD, value=cause.name, remedy=remedy) from error


def _load_recipe(file: requests.RecipeFile, description: ModelDescription) -> recipes.Recipe:
    """The recipe, with every module of the model from its own files. Raises ConfigError for one from elsewhere."""
    root = Path(file.root)
    for name, there in _imported_from_elsewhere(description, root):
        what = f"The model has a module called {name}, and this process has imported another one from {there}."
        raise ConfigError(what, field=FIELD, value=name, remedy="Load the model in a new process.")
    for place in (str(root / path) for path in _import_folders(description)):
        if place not in sys.path:
            sys.path.append(place)  # the root's own files are found first: recipes append it as well
    recipe = recipes.load(file.path, root, needs=("build_model",), fallback=file.fallback)
    for name, there in _imported_from_elsewhere(description, root):
        what = f"The model's module {name} was imported from {there} instead of the model's own files."
        remedy = "Load the model in a process whose module path has no module of that name."
        raise ConfigError(what, field=FIELD, value=name, remedy=remedy)
    return recipe


def _import_folders(description: ModelDescription) -> list[str]:
    """Folders of the code that imports start from; copies of trainflow's own recipes are never imported."""
    return [path for path in description.paths if path != KEPT]


def _imported_from_elsewhere(description: ModelDescription, root: Path) -> Iterator[tuple[str, str]]:
    """Modules with a name under which a file of the code may be imported, and where they are from instead."""
    files = [entry.path for entry in description.code if entry.path not in (description.recipe, description.fallback)]
    for path in files:
        for place in _import_folders(description):
            inside = path if place == "." else path.removeprefix(f"{place}/")
            if place == "." or inside != path:
                name = inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                there = getattr(sys.modules.get(name), "__file__", None)
                if there is not None and not Path(there).resolve().is_relative_to(root.resolve()):
                    yield name, there
