"""Inputs and results of a model, `compute_metrics` and the Trainer's methods. Plain data, no torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self


class ModelOutput(dict[str, Any]):
    """An output of a model's forward: a dictionary whose values are also attributes and positions.

    ``output.loss``, ``output["loss"]`` and ``output[0]`` are the same value. Entries that are None have an attribute,
    but neither a key nor a position. A subclass may be a dataclass, whose fields give the order. The class behaves as
    transformers' ``ModelOutput``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    if TYPE_CHECKING:  # its attributes depend on the model

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None or name in self:
            super().__setitem__(name, value)
        # Both ways in end here, so that key and attribute never differ.
        super().__setattr__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __reduce__(self) -> tuple[Any, ...]:
        # By keyword: a dataclass's constructor takes its fields, not a dict.
        return type(self)._rebuilt, (dict(self),)

    @classmethod
    def _rebuilt(cls, values: dict[str, Any]) -> Self:
        return cls(**values)

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are not None, in the order of a dataclass's fields, else in that of insertion."""
        names = [member.name for member in dataclasses.fields(self)] if dataclasses.is_dataclass(self) else list(self)
        return tuple(dict.__getitem__(self, name) for name in names if name in self)


class EvalPrediction:
    """The argument of `compute_metrics`; unpacks as ``predictions, label_ids[, inputs][, losses]``.

    Args:
        predictions: an array `[samples, ...]`, or a tuple of arrays for a model with several outputs.
        label_ids: an array `[samples, ...]`, or a tuple of arrays; None without labels.
        inputs: an array `[samples, ...]`; given if `include_for_metrics` names it.
        losses: an array `[samples]`; given if `include_for_metrics` names it.

    Attributes:
        whole_labels: where these samples are a resample of others (a bootstrap), `label_ids` of those; else its own. A
            constant to compare with, such as the most frequent class, is chosen by them: chosen for each resample it
            would always be too good.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = self.whole_labels = label_ids
        self.inputs = inputs
        self.losses = losses
        self.elements: tuple[Any, ...] = (predictions, label_ids)
        self.elements += tuple(extra for extra in (inputs, losses) if extra is not None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, index: int) -> Any:
        # As in the reference, from the front only; this IndexError also ends unpacking.
        if not 0 <= index < len(self.elements):
            raise IndexError("tuple index out of range")
        return self.elements[index]


class EvalLoopOutput(NamedTuple):
    """The result of `Trainer.evaluation_loop`; its fields are as in `PredictionOutput`, with the number of samples."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """The result of `Trainer.predict`.

    Attributes:
        predictions: an array `[samples, ...]`, or a tuple of arrays.
        label_ids: an array `[samples, ...]`, or a tuple of arrays; None without labels.
        metrics: by name, with their prefix.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """The result of `Trainer.train`: optimizer steps done, mean training loss, metrics of the run."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class BestRun(NamedTuple):
    """The result of `Trainer.hyperparameter_search`: the best trial's id, objective (or objectives) and parameters."""

    run_id: str
    objective: float | Sequence[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """``<split>_runtime`` in seconds, and ``<split>_{samples,steps,tokens}_per_second`` for the amounts of work given.

    The work began at `start_time`, of `time.time()`, and ends now.
    """
    runtime = time.time() - start_time
    result = {f"{split}_runtime": round(runtime, 4)}
    if runtime <= 0:  # a clock that was set back
        return result
    for name, amount in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
        if amount is not None:
            result[f"{split}_{name}_per_second"] = round(amount / runtime, 3)
    return result


# -- model FLOPs utilization (MFU) -------------------------------------------------------------------------------------
# MFU is what a training computes over what its devices could compute at their peak: model FLOPs of the steps / (seconds
# * devices * peak FLOP/s). Model FLOPs are those that the model needs, without recomputation. Source: Chowdhery et al.,
# "PaLM" (2022), appendix B. It counts 6 FLOPs per parameter and token, and those of attention. What is counted here is
# documented in `Trainer.floating_point_ops`; its default leaves attention out, so MFU is too low for long sequences.
#
# Part of the name that the driver gives -> TFLOP/s with 16-bit numbers (fp32 sums), TF32, and fp32. From the data
# sheets of NVIDIA, without sparsity. The first row that fits is taken, so longer names come first.
_PEAKS: tuple[tuple[str, float, float, float], ...] = (
    ("B200", 2250.0, 1100.0, 75.0),
    ("H200", 989.4, 494.7, 66.9),
    ("GH200", 989.4, 494.7, 66.9),
    ("H100 NVL", 835.5, 417.8, 60.0),
    ("H100 PCIe", 756.5, 378.0, 51.2),
    ("H100", 989.4, 494.7, 66.9),
    ("H800", 989.4, 494.7, 66.9),
    ("A100", 312.0, 156.0, 19.5),
    ("A800", 312.0, 156.0, 19.5),
    ("A30", 165.0, 82.0, 10.3),
    ("L40S", 362.0, 183.0, 91.6),
    ("L40", 181.0, 90.5, 90.5),
    ("L4", 121.0, 60.0, 30.3),
    ("V100", 125.0, 15.7, 15.7),
    ("T4", 65.0, 8.1, 8.1),
    ("RTX 4090", 165.2, 82.6, 82.6),
    ("RTX 3090", 71.0, 35.6, 35.6),
)
_COLUMNS = {"bf16": 1, "fp16": 1, "tf32": 2, "fp32": 3}


def find_peak(device: str, precision: str) -> float | None:
    """Peak FLOP/s of one device, by its driver's name for it ("NVIDIA H100 80GB HBM3"); None where it is not known.

    `precision` of matrix products: "bf16", "fp16", "tf32" or "fp32".
    """
    words = f" {device.replace('-', ' ')} "
    row = next((row for row in _PEAKS if f" {row[0]} " in words), None)
    return None if row is None else float(row[_COLUMNS[precision]]) * 1e12


def utilization(flops: float, seconds: float, *, devices: int, device: str, precision: str) -> float | None:
    """MFU, from 0 to 1, of the FLOPs of all devices in the seconds of training steps; None without a peak."""
    peak = find_peak(device, precision)
    return None if peak is None or seconds <= 0 or flops <= 0 else flops / (seconds * devices * peak)
