"""The verb *export_model*: a trained model in the form of another program, checked by the outputs of some rows.

torch-export   model.pt2, by torch.export: `torch.export.load(path).module()(inputs)`, inputs by name
onnx           model.onnx, by torch.onnx: needs onnx, onnxscript and onnxruntime
transformers   a folder that from_pretrained loads, with the tokenizer
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from trainer_lib.data.rows.column import LABELS, Column
from trainer_lib.data.rows.given_rows import GivenRows
from trainer_lib.data.rows.row_files import read_rows
from trainer_lib.errors import ConfigError, MissingExtraError, first_line
from trainer_lib.evaluation import nested
from trainer_lib.model_folder.loaded import LoadedModel, load_model
from trainer_lib.protocol.requests import ExportRequest, ExportResult
from trainer_lib.worker.predict import single_output
from trainer_lib.worker.process.session import Work

ROWS = 32
_ONNX = ("onnx", "onnxscript", "onnxruntime")
_TOLERANCE = 1e-3  # of an output, relative to the largest one
Run = Callable[[Mapping[str, Tensor]], Any]
"""The exported model: a batch to the outputs of its rows."""


def run(work: Work[ExportRequest]) -> ExportResult:
    """Export the model, and compare its outputs of up to 32 rows with those of the model."""
    request = work.request
    if request.form == "gguf":
        remedy = "Export to transformers, and give the folder to convert_hf_to_gguf.py of llama.cpp."
        raise ConfigError("trainflow writes no GGUF.", field="--to", value=request.form, remedy=remedy)
    if request.form == "onnx" and (missing := [name for name in _ONNX if importlib.util.find_spec(name) is None]):
        what = f"ONNX needs the packages {', '.join(missing)}."
        remedy = f"Install them: pip install {' '.join(missing)}."
        raise MissingExtraError(what, field="--to", value=request.form, remedy=remedy)
    loaded = load_model(request.model, trust_code=request.code)
    batch = _read_batch(request, loaded)
    folder = Path(request.output)
    folder.mkdir(parents=True, exist_ok=True)
    export = {"torch-export": _to_torch, "onnx": _to_onnx, "transformers": _to_transformers}[request.form]
    with torch.no_grad():
        exported = export(loaded, batch, folder)
        # Fewer rows as well: a form that holds for one size of batches is of no use.
        few = {name: value[:3] for name, value in batch.items()}
        apart = max(_compare(loaded.model, exported, part) for part in (batch, few))
    if not apart <= _TOLERANCE:
        what = f"The exported model's outputs differ from the model's, by {apart:.3g} of the largest one."
        raise ConfigError(what, field="--to", value=request.form, remedy="Use another form.")
    files = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    return ExportResult(files, len(next(iter(batch.values()))), float(apart))


class _Outputs(nn.Module):
    """A model that returns the outputs that predictions are made of, and no loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        return _main(self.model(**inputs))


def _main(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def _read_batch(request: ExportRequest, loaded: LoadedModel) -> dict[str, Tensor]:
    """A batch of the first rows of the files, or of rows at random where there are none."""
    form, columns = loaded.form, loaded.description.columns
    config: Any = getattr(loaded.model, "config", None)
    reads_tokens = getattr(loaded.model, "main_input_name", "") == "input_ids"
    if not request.sources and reads_tokens and not getattr(config, "is_encoder_decoder", False):
        ids = torch.randint(config.vocab_size, (ROWS, 8), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if request.sources:
        read = read_rows(request.sources, None, form.reading if form else None)
        given: Any = loaded.typed(row for _, row in islice(read, ROWS))
    else:
        draw, kinds = np.random.default_rng(0), {name: kind for name, kind in columns.items() if name not in LABELS}
        texts = loaded.description.info.get("texts")
        known = texts if isinstance(texts, Mapping) else {}
        rows = [{name: _draw(draw, kind, known.get(name)) for name, kind in kinds.items()} for _ in range(ROWS)]
        given = GivenRows(rows, columns)
    batch = (loaded.collate or default_collate)(list(given[:]))
    tensors = {name: value for name, value in dict(batch).items() if isinstance(value, Tensor) and name not in LABELS}
    if not tensors:
        what = "The recipe's collate gives no tensors by name, so the model's inputs are not known."
        raise ConfigError(what, field="MODEL", value=request.model, remedy="Return a mapping from names to tensors.")
    return tensors


def _draw(draw: np.random.Generator, kind: str, known: Any) -> Any:
    column = Column.parse(kind)
    if column.kind == "string":
        return str(draw.choice(known)) if known else " ".join(["word"] * int(draw.integers(3, 9)))
    if column.kind == "bytes" or column.has_texts:
        return b"" if column.kind == "bytes" else ["word"] * 5
    shape = (5,) if column.kind == "list" else column.shape
    dtype = np.dtype(column.dtype)
    values = draw.normal(size=shape) if dtype.kind == "f" else draw.integers(0, 2, shape)
    return np.asarray(values, dtype) if shape else dtype.type(values).item()


def _shapes(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Every dimension may vary, unless the model says otherwise."""
    return {"inputs": {name: dict.fromkeys(range(value.ndim), torch.export.Dim.AUTO) for name, value in batch.items()}}


def _to_torch(loaded: LoadedModel, batch: Mapping[str, Tensor], folder: Path) -> Run:
    path = folder / "model.pt2"
    program = _trace(lambda: torch.export.export(
        _Outputs(loaded.model), (dict(batch),), dynamic_shapes=_shapes(batch), strict=False
    ))  # fmt: skip
    torch.export.save(program, path)
    module = torch.export.load(path).module()
    return lambda part: module(dict(part))


def _to_onnx(loaded: LoadedModel, batch: Mapping[str, Tensor], folder: Path) -> Run:
    import onnxruntime  # type: ignore[import-not-found, unused-ignore]

    path = folder / "model.onnx"
    # By name: torch.onnx takes a dict that comes last for the keywords.
    settings: dict[str, Any] = {"kwargs": {"inputs": dict(batch)}, "dynamic_shapes": _shapes(batch)}
    program = _trace(lambda: torch.onnx.export(_Outputs(loaded.model), dynamo=True, verbose=False, **settings))
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in session.get_inputs()]

    def call(part: Mapping[str, Tensor]) -> Any:
        values = part if set(names) <= set(part) else dict(zip(names, part.values(), strict=True))
        return torch.from_numpy(session.run(None, {name: values[name].numpy() for name in names})[0])

    return call


def _trace(export: Callable[[], Any]) -> Any:
    try:
        return export()
    except Exception as error:  # of many kinds: what torch cannot follow depends on the model
        cause = error.__cause__ or error  # of torch.onnx the error of torch.export
        what = f"torch cannot follow this model's forward: {first_line(cause)}"
        raise ConfigError(
            what, field="--to", remedy="Use another form, or make forward independent of values."
        ) from error


def _to_transformers(loaded: LoadedModel, batch: Mapping[str, Tensor], folder: Path) -> Run:
    model: Any = loaded.model
    is_adapted = hasattr(model, "peft_config")
    if is_adapted or not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        what = "The model has adapters." if is_adapted else "The model is none of transformers."
        remedy = "Publish it with publish.merge_adapters=true." if is_adapted else "Use torch-export or onnx."
        raise ConfigError(what, field="--to", value="transformers", remedy=remedy)
    model.save_pretrained(folder)
    loaded.write_tokenizer(folder)
    again = type(model).from_pretrained(folder).eval()
    return lambda part: _main(again(**part))


def _compare(model: nn.Module, exported: Run, batch: Mapping[str, Tensor]) -> float:
    """The greatest difference of two outputs of a batch, relative to the largest output."""
    wanted, got = (nested.to_numpy(outputs) for outputs in (_main(model(**batch)), exported(batch)))
    wanted, got = (np.asarray(single_output(outputs), np.float64) for outputs in (wanted, got))
    if wanted.shape != got.shape:
        return float("inf")
    return float(np.abs(wanted - got).max() / max(np.abs(wanted).max(), 1e-6))
