"""What a process has: its device, precision and memory, its peers, and what its errors say."""

from __future__ import annotations

import mmap
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer_lib import errors
from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.parallelism_config import Layout
from trainer_lib.base.memory import MemoryTracker
from trainer_lib.distributed import communicator as distributed
from trainer_lib.distributed.communicator import SingleProcess, choose_device
from trainer_lib.distributed.precision import apply_tf32, create_precision, full_eval_dtype
from trainer_lib.protocol.footprint import STRATEGIES, Footprint, ModelSize, footprints
from trainer_lib.trainer.attempts import MemoryRanOut, call_within_memory

TASKS = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
CPU = torch.device("cpu")
SIZE = ModelSize(100, 100, 400, 400, 800, 50, None, 100, 400)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_the_nth_process_of_a_machine_takes_the_nth_gpu(gpus: pytest.MonkeyPatch) -> None:
    assert choose_device(use_cpu=False) == torch.device("cuda", 0)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        gpus.setenv(name, value)
    assert choose_device(use_cpu=False) == torch.device("cuda", 1)
    assert choose_device(use_cpu=True) == torch.device("cpu")
    gpus.setenv("LOCAL_RANK", "2")
    with pytest.raises(errors.ConfigError, match="LOCAL_RANK = 2: There are only 2 GPUs"):
        choose_device(use_cpu=False)


def test_a_task_of_slurm_that_sees_one_gpu_takes_it(gpus: pytest.MonkeyPatch) -> None:
    for name, value in {**TASKS, "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}.items():
        gpus.setenv(name, value)
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device(use_cpu=False) == torch.device("cuda", 0)
    gpus.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device(use_cpu=False) == torch.device("cuda", 3)


def test_mps_is_taken_alone_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device(use_cpu=False) == torch.device("mps")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(errors.ConfigError, match="MPS serves one process"):
        choose_device(use_cpu=False)


def test_xla_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("torch_xla")
    package.__spec__ = ModuleSpec("torch_xla", None)
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(use_cpu=False) == torch.device("cpu")  # installed, but not asked for
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert choose_device(use_cpu=True) == torch.device("cpu")
    with pytest.raises(errors.ConfigError, match=r"PJRT_DEVICE = TPU: XLA is not served.*use_cpu=True"):
        choose_device(use_cpu=False)


@pytest.mark.parametrize(
    ("given", "name", "dtype"),
    [({}, "fp32", torch.float32), ({"bf16": True}, "bf16", torch.bfloat16), ({"fp16": True}, "fp16", torch.float16)],
)
def test_products_are_computed_in_the_format_asked_for(given: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    precision = create_precision(TrainingArguments(**given), CPU)
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert precision.name == name
    assert (precision.scaler is not None) == (name == "fp16")


def test_tf32_is_what_is_asked_for_or_stays() -> None:
    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [place.allow_tf32 for place in places]
    try:
        for asked, allowed in ((False, False), (None, False), (True, True), (None, True)):
            apply_tf32(TrainingArguments(tf32=asked))
            assert [place.allow_tf32 for place in places] == [allowed] * 2
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


def test_the_scalers_state_is_plain_numbers_and_comes_back() -> None:
    one, other = (create_precision(TrainingArguments(fp16=True), CPU) for _ in range(2))
    assert one.scaler is not None and other.scaler is not None
    one.load_scaler_state({**(one.scaler_state() or {}), "scale": 8.0, "_growth_tracker": 3})
    other.load_scaler_state(one.scaler_state())
    assert other.scaler.get_scale() == 8.0
    assert other.scaler_state() == one.scaler_state()
    plain = create_precision(TrainingArguments(), CPU)
    plain.load_scaler_state(one.scaler_state())
    assert plain.scaler_state() is None


def test_whole_models_are_cast_for_evaluation_when_asked() -> None:
    assert full_eval_dtype(TrainingArguments()) is None
    assert full_eval_dtype(TrainingArguments(bf16_full_eval=True)) is torch.bfloat16
    assert full_eval_dtype(TrainingArguments(fp16_full_eval=True)) is torch.float16
    with pytest.raises(
        errors.ConfigError, match=r"fp16 = True: Training in float16 is not supported on MPS\. Use bf16=True"
    ):
        create_precision(TrainingArguments(fp16=True), torch.device("mps"))


def test_memory_is_reported_per_stage_and_init_with_the_first() -> None:
    tracker = MemoryTracker(enabled=True, device=CPU)
    tracker.start("init")
    tracker.stop("init")
    metrics: dict[str, Any] = {}
    tracker.start("train")
    tracker.start("eval")  # nested: the outer stage wins
    block = mmap.mmap(-1, 80 << 20)  # past the allocator, which may keep as much of earlier blocks
    block[:: mmap.PAGESIZE] = b"1" * (len(block) // mmap.PAGESIZE)
    tracker.stop("eval", {})
    tracker.stop("train", metrics)
    measured = {f"{stage}_mem_cpu_{kind}_delta" for stage in ("init", "train") for kind in ("alloc", "peaked")}
    assert metrics.keys() == {"before_init_mem_cpu", *measured}
    assert metrics["train_mem_cpu_alloc_delta"] >= len(block) * 0.9
    for another, keys in (
        (tracker, {"test_mem_cpu_alloc_delta", "test_mem_cpu_peaked_delta"}),
        (MemoryTracker(enabled=False), set()),
    ):
        again: dict[str, Any] = {}
        another.start("test")
        another.stop("test", again)
        another.abandon()
        assert set(again) == keys


def by_name(size: ModelSize, processes: int, **settings: Any) -> dict[str, Footprint]:
    return {each.strategy: each for each in footprints(size, processes, **settings)}


def test_a_small_bucket_is_taken_as_it_is_set_and_a_large_evaluation_is_the_peak() -> None:
    assert by_name(replace(SIZE, evaluation_bytes=10_000), 1)["single"].total == 400 + 800 + 10_000
    ranks = by_name(replace(SIZE, micro_batch=4), 2, alone=8)  # one process alone may have a larger micro batch
    assert (ranks["single"].activations, ranks["ddp"].activations) == (100, 50)
    # A part that does not come out even counts as the largest.
    assert by_name(replace(SIZE, stored_bytes=401), 4)["fsdp"].checkpoint == 301


def test_what_is_not_known_stays_unknown() -> None:
    unknown = replace(SIZE, optimizer_bytes=None)
    assert [each.total for each in footprints(unknown, 2)] == [None] * len(STRATEGIES)
    assert [each.checkpoint for each in footprints(unknown, 2)] == [None] * len(STRATEGIES)
    assert unknown.checkpoint_bytes() is None
    assert SIZE.checkpoint_bytes() == 1200


@pytest.mark.parametrize(
    ("strategy", "held", "written"),
    [
        ("single", (400, 400, 800, 0), (1200, 1)),
        ("ddp", (400, 400, 800, 400), (1200, 1)),  # the other ranks hold the same, and write none of it
        ("fsdp", (100, 100, 200, 200), (300, 4)),
        ("zero-1", (500, 400, 200, 800), (1200, 1)),  # what ZeRO shards is gathered to the first rank
        ("zero-2", (500, 100, 200, 800), (1200, 1)),
        ("zero-3", (200, 100, 200, 900), (1200, 1)),
    ],
)
def test_what_each_strategy_holds_and_writes_on_each_of_four_ranks(
    strategy: str, held: tuple[int, ...], written: tuple[int, int]
) -> None:
    rank = by_name(SIZE, 4)[strategy]
    assert (rank.parameters, rank.gradients, rank.optimizer, rank.exchange) == held
    assert rank.total == sum(held) + 50
    assert rank.processes == (1 if strategy == "single" else 4)
    assert (rank.checkpoint, rank.writers) == written


@pytest.mark.parametrize(
    ("layout", "held", "written"),
    [
        ({"tensor": 4}, (160, 160, 320, 0), (480, 4)),  # 320 of 400 bytes are in divided layers
        ({"shard": 2, "tensor": 2}, (120, 120, 240, 120), (360, 4)),
        ({"replicate": 2, "tensor": 2}, (240, 240, 480, 240), (720, 2)),
        ({"replicate": 2, "shard": 2}, (200, 200, 400, 200), (600, 2)),
        ({"shard": 2, "expert": 2}, (100, 100, 200, 200), (300, 4)),
        ({"shard": 2, "sequence": 2}, (100, 100, 200, 200), (300, 4)),
    ],
)
def test_what_a_rank_of_a_layout_holds(layout: dict[str, Any], held: tuple[int, ...], written: tuple[int, int]) -> None:
    sizes = Layout(**layout)
    parts = sizes.replicate, sizes.shards, sizes.tensor
    rank = by_name(replace(SIZE, divided_bytes=320), 4, layout=parts)["layout"]
    assert (rank.parameters, rank.gradients, rank.optimizer, rank.exchange) == held
    assert (rank.checkpoint, rank.writers, rank.processes) == (*written, 4)


@pytest.mark.parametrize(("writers", "each"), [(None, 200), (1, 600), (3, 200), (4, 150)])
def test_fsdp_is_written_by_as_many_ranks_as_its_settings_say(writers: int | None, each: int) -> None:
    rank = by_name(replace(SIZE, optimizer_bytes=200), 3, writers=writers)["fsdp"]
    assert (rank.checkpoint, rank.writers) == (each, writers or 3)


def test_a_checkpoint_of_the_model_alone_has_no_optimizer_state() -> None:
    ranks = by_name(replace(SIZE, optimizer_bytes=None), 2, only_model=True)
    assert {name: rank.checkpoint for name, rank in ranks.items()} == {
        **dict.fromkeys(("single", "ddp", "zero-1", "zero-2", "zero-3"), 400),
        "fsdp": 200,
    }


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"), True),
        (RuntimeError("Broken pipe"), True),
        (RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"), True),
        (RuntimeError("NCCL Error 6: remote process exited"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1"), True),
        (dist.DistNetworkError("The client socket has timed out after 300s"), True),
        (dist.DistStoreError("wait timeout"), True),
        # A cause is not taken for a lost peer.
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
        (dist.DistBackendError("NCCL error: unhandled cuda error: Cuda failure 2 'out of memory'"), False),
        (errors.InfrastructureError("A worker could not be started."), False),
        (errors.DataError("It is empty."), False),
    ],
)
def test_a_lost_peer_is_recognized_by_class_or_text(error: Exception, is_lost: bool) -> None:
    assert errors.is_lost_peer(error) is is_lost
    typed = errors.lost_peer_error(error, rank=2)
    assert (typed is not None) is is_lost
    if typed is not None:
        assert isinstance(typed, errors.InfrastructureError) and typed.rank == 2
        typed.__cause__ = error
        assert errors.is_lost_peer(typed)  # as the Trainer raises it: still a consequence
        assert errors.lost_peer_error(typed, rank=2) is None  # typed already


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    distributed._recent.clear()
    yield
    distributed._recent.clear()


def test_a_thread_that_never_drops_its_tensor_delays_the_end_no_longer_than_the_limit() -> None:
    held = distributed.remember(torch.zeros(1))
    assert not distributed.wait_until_released(0.05)
    assert held.item() == 0
    distributed._recent.clear()
    # Large tensors are not kept alive, and small ones only the newest.
    distributed.remember(torch.zeros(1_000_000))
    assert not distributed._recent
    for _ in range(1_000):
        distributed.remember(torch.zeros(1))
    assert len(distributed._recent) == 64
    assert distributed.wait_until_released(5)


def test_the_group_ends_after_the_threads_have_dropped_what_they_held(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.form_alone(torch.device("cpu"))
    held = [distributed.remember(torch.zeros(1))]
    held_at_the_end: list[int] = []
    end = dist.destroy_process_group

    def note_and_end() -> None:
        held_at_the_end.append(len(held))
        end()

    monkeypatch.setattr(dist, "destroy_process_group", note_and_end)
    dropped = threading.Timer(0.2, held.clear)
    dropped.start()
    distributed.shutdown()
    assert held_at_the_end == [0]
    assert not dist.is_initialized()
    dropped.join()


def test_a_tensor_in_the_frames_of_an_error_that_is_over_does_not_delay_the_end() -> None:
    distributed.form_alone(torch.device("cpu"))
    cycle: list[object] = [distributed.remember(torch.zeros(1))]
    cycle.append(cycle)
    del cycle
    started = time.monotonic()
    distributed.shutdown()
    assert time.monotonic() - started < distributed._LEAVE_S
    assert not distributed._recent


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("one\ntwo", "one"),
        ("\n  \nthe reason\n", "the reason"),
        ("", "OSError"),
        (" \n", "OSError"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_an_error_is_told_in_one_line_that_is_never_empty(message: str, line: str) -> None:
    assert errors.first_line(OSError(message)) == line


def test_memory_that_ran_out_is_noticed_whatever_the_message_begins_with() -> None:
    def work() -> None:
        raise MemoryError("\nCUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(MemoryRanOut, match="CUDA out of memory"):
        call_within_memory(SingleProcess(), work)
    # As with transformers, callers catch wrong input as value errors.
    assert issubclass(errors.ConfigError, ValueError) and issubclass(errors.DataError, ValueError)


def test_a_folder_for_temporary_files_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed"))
    with pytest.raises(FileNotFoundError) as missing:
        tempfile.mkdtemp()
    failure = errors.from_exception(missing.value)
    assert isinstance(failure, errors.StorageError)
    assert (failure.field, failure.value) == ("TMPDIR", str(tmp_path / "removed"))
    with pytest.raises(FileNotFoundError) as another:
        (tmp_path / "data.csv").read_text()
    assert isinstance(errors.from_exception(another.value), errors.CodeError)
