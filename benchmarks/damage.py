"""Damage to a checkpoint that is noticed before it is used: flipped bits and cut files, ours and the peer's.

    python -m benchmarks.damage --size full --save

A small language model of transformers is trained; its newest checkpoint is damaged in one place at a time, a file
chosen evenly, a place in it evenly. Ours is *detected* when loading raises a typed error that names the file, and *gone
round* when a resume by itself takes the checkpoint before. The Trainer of transformers is given the same kind of damage
to its own checkpoint and asked to resume from it for one more step: *refused* when it raises anything, *silent* when it
goes on, *changed* when it went on silently and ends with other weights than from the undamaged checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks._result import arguments, publish
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.checkpoint.catalogue import find_newest_intact
from trainer_lib.checkpoint.layout import DAMAGED
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import DamagedError
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT

SIZES = {"smallest": (40, 10, 10, 5), "mid": (250, 50, 60, 20), "full": (1_000, 200, 300, 60)}
"""Flips and cuts of trainflow's checkpoints, then of the peer's."""
STEPS = 4
Harm = Callable[[random.Random, bytes], bytes]


def flip(chance: random.Random, data: bytes) -> bytes:
    """Flip one bit."""
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def cut(chance: random.Random, data: bytes) -> bytes:
    """Cut the file short."""
    return data[: chance.randrange(len(data))]


def model() -> Any:
    """Build a two-layer decoder of 5,000 parameters, equal at each call."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))


def rows() -> list[dict[str, torch.Tensor]]:
    """Sixteen texts of eight tokens."""
    tokens = torch.randint(3, 32, (16, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": text, "labels": text} for text in tokens]


def trained(library: Any, folder: Path, resume: str | None = None, **given: Any) -> Any:
    """Train for `STEPS` steps, or from a checkpoint on, and return the model."""
    settings: dict[str, Any] = {"max_steps": STEPS, "save_steps": STEPS // 2, "per_device_train_batch_size": 4}
    settings |= {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "logging_strategy": "no"}
    settings |= {"lr_scheduler_type": "constant", **given}
    of = TrainingArguments if library is None else library.TrainingArguments
    make = Trainer if library is None else library.Trainer
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        one = make(model=model(), args=of(output_dir=str(folder), **settings), train_dataset=rows())
        one.train(resume_from_checkpoint=resume)
    return one.model


@contextlib.contextmanager
def damaged(checkpoint: Path, file: Path, harm: Harm, chance: random.Random) -> Iterator[None]:
    """Damage a file during a block, and undo afterwards what a resume changed because of it."""
    kept = {path: path.read_bytes() for path in (file, checkpoint / COMMIT) if path.exists()}
    file.write_bytes(harm(chance, kept[file]))
    try:
        yield
    finally:
        (checkpoint / DAMAGED).unlink(missing_ok=True)
        for path, data in kept.items():
            path.write_bytes(data)


def files_of(folder: Path) -> list[Path]:
    """Return the files that can be damaged: all that are not empty."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def ours(folder: Path, harm: Harm, count: int, chance: random.Random) -> dict[str, Any]:
    """Damage our checkpoint `count` times."""
    newest = folder / f"checkpoint-{STEPS}"
    files = files_of(newest)
    result: Counter[str] = Counter()
    for _ in range(count):
        file = chance.choice(files)
        with damaged(newest, file, harm, chance):
            result["detected"] += _is_refused(folder, newest.name, file)
            told: list[str] = []
            found = find_newest_intact(Store.open(folder), on_damage=told.append)
            result["gone_round"] += found is not None and found.step == STEPS // 2 and len(told) == 1
    return {"tried": count, "files": len(files), **result, "detected_share": result["detected"] / count}


def _is_refused(folder: Path, name: str, file: Path) -> bool:
    """Return whether loading raises a typed error that names the file."""
    try:
        loaded = load_checkpoint(Store.open(folder), name, SingleProcess())
        loaded.read_model()
        loaded.read_optimizer()
        for entry in loaded.commit.files:
            loaded.read_file(entry.path)
    except DamagedError as error:
        return str(error.field).endswith(file.relative_to(folder / name).as_posix())
    return False


def peer(folder: Path, harm: Harm, count: int, chance: random.Random) -> dict[str, Any]:
    """Damage the checkpoint of the Trainer of transformers `count` times."""
    newest = folder / f"checkpoint-{STEPS}"
    files = files_of(newest)

    def go_on() -> Any:
        return trained(transformers, folder, str(newest), max_steps=STEPS + 1, save_strategy="no").state_dict()

    whole = go_on()
    result: Counter[str] = Counter()
    silent: Counter[str] = Counter()
    for _ in range(count):
        file = chance.choice(files)
        with damaged(newest, file, harm, chance):
            try:
                after = go_on()
            except Exception:
                result["refused"] += 1
                continue
        is_changed = any(not torch.equal(value, whole[name]) for name, value in after.items())
        result["silent"] += 1
        result["changed"] += is_changed
        silent[file.name + (" (weights changed)" if is_changed else "")] += 1
    shares = {"silent_share": result["silent"] / count, "changed_share": result["changed"] / count}
    return {"tried": count, "files": len(files), **result, **shares, "silent_by_file": dict(silent.most_common())}


def measure(counts: tuple[int, int, int, int]) -> dict[str, Any]:
    """Run both libraries, with flips and cuts."""
    with tempfile.TemporaryDirectory() as place:
        homes = {"ours": Path(place, "ours"), "peer": Path(place, "peer")}
        trained(None, homes["ours"])
        trained(transformers, homes["peer"])
        chance = random.Random(0)
        return {
            "ours": {
                "flipped bits": ours(homes["ours"], flip, counts[0], chance),
                "cut files": ours(homes["ours"], cut, counts[1], chance),
            },
            "peer": {
                "flipped bits": peer(homes["peer"], flip, counts[2], chance),
                "cut files": peer(homes["peer"], cut, counts[3], chance),
            },
        }


def main() -> None:
    """Damage, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    publish("damage", chosen.size, {"results": measure(SIZES[chosen.size])}, chosen.save)


if __name__ == "__main__":
    main()
