"""Number formats and the memory report."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_lib.errors import ConfigError
from trainer_lib.memory import MemoryTracker
from trainer_lib.precision import create_precision, full_eval_dtype

CPU = torch.device("cpu")


class Settings:
    bf16 = fp16 = bf16_full_eval = fp16_full_eval = False
    tf32: bool | None = None

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


@pytest.mark.parametrize(
    ("given", "name", "dtype"),
    [({}, "fp32", torch.float32), ({"bf16": True}, "bf16", torch.bfloat16), ({"fp16": True}, "fp16", torch.float16)],
)
def test_products_are_computed_in_the_format_asked_for(given: dict[str, bool], name: str, dtype: torch.dtype) -> None:
    precision = create_precision(Settings(**given), CPU)
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert precision.name == name
    assert (precision.scaler is not None) == (name == "fp16")


def test_the_scalers_state_is_plain_numbers_and_comes_back() -> None:
    one, other = (create_precision(Settings(fp16=True), CPU) for _ in range(2))
    assert one.scaler is not None and other.scaler is not None
    one.load_scaler_state({**(one.scaler_state() or {}), "scale": 8.0, "_growth_tracker": 3})
    other.load_scaler_state(one.scaler_state())
    assert other.scaler.get_scale() == 8.0
    assert other.scaler_state() == one.scaler_state()
    plain = create_precision(Settings(), CPU)
    plain.load_scaler_state(one.scaler_state())
    assert plain.scaler_state() is None


def test_what_a_device_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp16 = True: Training in float16 is not supported on MPS\. Use bf16=True"):
        create_precision(Settings(fp16=True), torch.device("mps"))


def test_whole_models_are_cast_for_evaluation_when_asked() -> None:
    assert full_eval_dtype(Settings()) is None
    assert full_eval_dtype(Settings(bf16_full_eval=True)) is torch.bfloat16
    assert full_eval_dtype(Settings(fp16_full_eval=True)) is torch.float16


def test_memory_is_reported_per_stage_and_init_with_the_first() -> None:
    tracker = MemoryTracker(enabled=True, device=CPU)
    tracker.start("init")
    tracker.stop("init")
    metrics: dict[str, Any] = {}
    tracker.start("train")
    tracker.start("eval")  # nested: the outer stage wins
    block = torch.ones(80 << 18)  # 80 MiB: beyond what the allocator keeps of earlier blocks
    tracker.stop("eval", {})
    tracker.stop("train", metrics)
    assert metrics.keys() == {
        "before_init_mem_cpu",
        *(f"{stage}_mem_cpu_{kind}_delta" for stage in ("init", "train") for kind in ("alloc", "peaked")),
    }
    assert metrics["train_mem_cpu_alloc_delta"] >= block.nbytes * 0.9
    again: dict[str, Any] = {}
    tracker.start("test")
    tracker.stop("test", again)
    assert set(again) == {"test_mem_cpu_alloc_delta", "test_mem_cpu_peaked_delta"}


def test_memory_is_left_alone_when_not_asked_for() -> None:
    tracker = MemoryTracker(enabled=False)
    metrics: dict[str, Any] = {}
    tracker.start("train")
    tracker.stop("train", metrics)
    tracker.abandon()
    assert metrics == {}
