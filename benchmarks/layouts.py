"""A Llama in six layouts of four processes: its losses, checkpoints and calls, and resuming after SIGKILL.

    python -m benchmarks.layouts --size full --save

A Llama of two layers trains 10 steps over gloo. For each layout: the largest relative difference of a loss from one
process's; the bytes of tensors in a checkpoint, to one model with one state of AdamW; calls of Python in a step, to
those of `fsdp="full_shard auto_wrap"`. Then a rank is killed by SIGKILL at a random moment, and the training resumes in
the same layout; `equal` counts those whose losses and tensors on all ranks are those of a training without a kill, to
the bit. For the 30 pairs of different layouts, a training that was saved in one after 4 steps resumes in the other: the
largest relative difference of a loss from one process's. The same by the Trainer of transformers with
`parallelism_config`, which shards what `from_pretrained` has divided: its losses where it trains, the difference where
it resumes after 6 steps, else the end of what it says.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._result import arguments, publish
from benchmarks.step_overhead import CallCounter
from tests.support.distributed import RemoteFailure, loaded, run_distributed
from tests.support.tiny_models import llama, lm_rows
from trainer_lib import Trainer, TrainerCallback, TrainingArguments
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.storage import Store

SIZES = {"smallest": 2, "full": 30}  # kills
LAYOUTS: dict[str, dict[str, int]] = {
    "replicate 4": {"replicate": 4},
    "shard 4": {"shard": 4},
    "tensor 2 x replicate 2": {"replicate": 2, "tensor": 2},
    "tensor 2 x shard 2": {"shard": 2, "tensor": 2},
    "tensor 4": {"tensor": 4},
    "replicate 2 x shard 2": {"replicate": 2, "shard": 2},
}
PEER_NAMES = {"replicate": "dp_replicate_size", "shard": "dp_shard_size", "tensor": "tp_size"}
PROCESSES, STEPS, BATCH, SAVED, PEER_SAVED = 4, 10, 8, 2, 6
MOVED = 4  # the step that the other layouts resume from
HANG_S, KILLING_S = 90.0, 1500.0
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 64}
RUN: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}


def model() -> Any:
    """Return the Llama, always with the same weights."""
    return llama(**HEADS, intermediate_size=128)


class Killer(TrainerCallback):
    """Kills this process some seconds into a step, without a warning."""

    def __init__(self, step: int, after_s: float) -> None:
        self._step, self._after_s = step, after_s

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        if state.global_step == self._step:
            timer = threading.Timer(self._after_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()


def make(folder: str, layout: dict[str, int] | None, **given: Any) -> Trainer:
    """Return a Trainer in a layout; None: one process, or what `given` says."""
    callbacks = given.pop("callbacks", [])
    laid_out = {"parallelism": layout} if layout else {}
    args = TrainingArguments(folder, global_batch_size=BATCH, save_steps=SAVED, **{**RUN, **laid_out, **given})
    return Trainer(model(), args, train_dataset=lm_rows(64), callbacks=callbacks)


def train(folder: str, layout: dict[str, int] | None, kill: tuple[int, int, float] | None = None) -> dict[str, Any]:
    """Train, from the last checkpoint if there is one; with `kill` (rank, step, seconds) that rank is killed."""
    killed = kill is not None and kill[0] == int(os.environ.get("RANK", "0"))
    made = make(folder, layout, callbacks=[Killer(*kill[1:])] if kill and killed else [])
    kept = list_checkpoints(Store.open(folder))
    start = time.perf_counter()
    made.train(resume_from_checkpoint=bool(kept))
    seconds, digest = time.perf_counter() - start, hashlib.sha256()
    for name, value in sorted(made.model_wrapped.state_dict().items()):
        tensor = value.to_local() if hasattr(value, "to_local") else value
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return {
        "losses": [row["loss"] for row in made.state.log_history if "loss" in row],
        "digest": digest.hexdigest(),
        "seconds": seconds,
        "from": max((info.step for info in kept), default=0),
    }


def resume_elsewhere(folder: str) -> dict[str, list[float]]:
    """Resume in every layout from the checkpoint of every other one; returns the losses of all steps."""
    losses = {}
    for before, after in itertools.permutations(LAYOUTS, 2):
        made = make(f"{folder}/{before} then {after}", LAYOUTS[after], save_strategy="no")
        made.train(resume_from_checkpoint=f"{folder}/{before}/checkpoint-{MOVED}")
        losses[f"{before} -> {after}"] = [row["loss"] for row in made.state.log_history if "loss" in row]
    return losses


def count_calls(folder: str, layouts: dict[str, dict[str, int]]) -> dict[str, float]:
    """Count the calls of Python in a step in every layout, and under `fsdp`."""
    calls = {}
    for name, layout in {"fsdp": None, **layouts}.items():
        counter, callback = CallCounter(), TrainerCallback()
        callback.on_step_end = lambda *_, count=counter, **__: count.stamp()  # type: ignore[method-assign]
        given: dict[str, Any] = {"max_steps": 16, "save_strategy": "no", "callbacks": [callback]}
        try:
            fsdp = {"fsdp": "full_shard auto_wrap"} if layout is None else {}
            make(f"{folder}/{name}", layout, **given, **fsdp).train()
        finally:
            sys.setprofile(None)
        calls[name] = statistics.median(counter.python[-6:])
    return calls


def differ(losses: list[float], alone: list[float]) -> float:
    """Return the largest relative difference of two series."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))


def tensor_bytes(folder: Path) -> int:
    """Count the bytes of all tensors' files in the last checkpoint."""
    return sum(path.stat().st_size for path in (folder / f"checkpoint-{STEPS}").rglob("*.safetensors"))


def kill_some(folder: Path, count: int, whole: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Kill a random rank in layouts taken in turn, until `count` were killed or time is up, and resume each."""
    end = time.monotonic() + KILLING_S
    draw, killed, equal, turn, starts = random.Random(0), 0, 0, 0, list[int]()
    names = list(whole)
    while killed < count and time.monotonic() < end:
        name, at = names[turn % len(names)], str(folder / f"killed {turn}")
        turn += 1
        step_s = whole[name][0]["seconds"] / STEPS
        kill = draw.randrange(PROCESSES), draw.randrange(1, STEPS), draw.uniform(0, 1.5) * step_s
        try:
            run_distributed(train, PROCESSES, at, LAYOUTS[name], kill, timeout_s=HANG_S)
            continue  # it was done before
        except RemoteFailure as error:
            if f"rank {kill[0]} died with exit code -9" not in str(error):
                raise
        except Exception as error:  # another rank was first to say that its neighbour is gone
            print(f"{name}: {type(error).__name__}", file=sys.stderr)
        killed += 1
        ranks = run_distributed(train, PROCESSES, at, LAYOUTS[name], timeout_s=HANG_S)
        same = [
            (a["losses"], a["digest"]) == (b["losses"], b["digest"]) for a, b in zip(ranks, whole[name], strict=True)
        ]
        equal += all(same)
        starts.append(ranks[0]["from"])
    return {"kills": killed, "equal": equal, "resumed_from_step": {step: starts.count(step) for step in sorted(starts)}}


def train_peer(folder: str, base: str, layout: dict[str, int], resume: bool) -> list[float]:
    """Train by the Trainer of transformers; returns its losses."""
    import transformers
    from accelerate.parallelism_config import ParallelismConfig

    sizes = {PEER_NAMES[name]: size for name, size in layout.items()}
    divided: dict[str, Any] = {"tp_plan": "auto", "tp_size": layout["tensor"]} if "tensor" in layout else {}
    if divided and layout["tensor"] < PROCESSES:
        from torch.distributed.device_mesh import init_device_mesh

        torch.distributed.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (PROCESSES // layout["tensor"], layout["tensor"]), mesh_dim_names=("dp", "tp"))
        divided = {"tp_plan": "auto", "device_mesh": mesh["tp"]}
    held = transformers.LlamaForCausalLM.from_pretrained(base, **divided)
    share = PROCESSES // layout.get("tensor", 1)
    args = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH // share,
        parallelism_config=ParallelismConfig(**sizes),
        save_steps=PEER_SAVED,
        fsdp="full_shard",  # what its refusal of a ParallelismConfig asks for
        fsdp_config={"version": 2},
        **RUN,
    )
    made = transformers.Trainer(held, args, train_dataset=lm_rows(64))
    made.train(resume_from_checkpoint=f"{folder}/checkpoint-{PEER_SAVED}" if resume else None)
    return [row["loss"] for row in made.state.log_history if "loss" in row]


def ask_peer(folder: Path, layout: dict[str, int], base: str) -> dict[str, Any]:
    """Return whether the peer trains, and resumes: the difference from its own training, or what it says."""
    said: dict[str, Any] = {}
    losses: list[float] = []
    for resume, name in ((False, "trains"), (True, "resumes")):
        try:
            [now, *_] = run_distributed(train_peer, PROCESSES, str(folder), base, layout, resume, timeout_s=HANG_S)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:240]}"
            break
        said[name] = differ(now, losses) if resume else f"{len(now)} losses, the last {now[-1]}"
        losses = now
    return said


def measure(kills: int, folder: Path) -> dict[str, Any]:
    """Measure all of it."""
    alone = train(str(folder / "one"), None)
    one = tensor_bytes(folder / "one")
    numbers = 3 * 4 * sum(parameter.numel() for parameter in model().parameters())
    result: dict[str, Any] = {"one model and one state": numbers, "one": {"bytes": one, "bytes_ratio": one / numbers}}
    whole = {}
    for name, layout in LAYOUTS.items():
        whole[name] = run_distributed(train, PROCESSES, str(folder / name), layout, timeout_s=HANG_S)
        size = tensor_bytes(folder / name)
        difference = max(differ(rank["losses"], alone["losses"]) for rank in whole[name])
        result[name] = {"largest_loss_difference": difference, "bytes": size, "bytes_ratio": size / numbers}
    pairs = run_distributed(resume_elsewhere, PROCESSES, str(folder), timeout_s=KILLING_S)[0]
    differences = {pair: differ(losses, alone["losses"]) for pair, losses in pairs.items()}
    result["pairs"] = {"count": len(pairs), "largest_loss_difference": max(differences.values()), **differences}
    calls = run_distributed(count_calls, PROCESSES, str(folder / "calls"), LAYOUTS, timeout_s=3 * HANG_S)[0]
    result["fsdp"] = {"python_calls": calls["fsdp"]}
    for name in LAYOUTS:
        result[name] |= {"python_calls": calls[name], "calls_to_fsdp": calls[name] / calls["fsdp"]}
    base = str(folder / "base")
    model().save_pretrained(base)
    for name, layout in LAYOUTS.items():
        result[name]["transformers"] = ask_peer(folder / f"peer {name}", layout, base)
    result["killed"] = kill_some(folder, kills, whole)
    return result


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, loaded("transformers.models.llama.modeling_llama"):
        result = measure(SIZES[chosen.size], Path(folder))
    publish("layouts", chosen.size, {"processes": PROCESSES, "steps": STEPS, "results": result}, chosen.save)


if __name__ == "__main__":
    main()
