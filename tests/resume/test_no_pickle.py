"""A training's whole life without unpickling anything or running what a file says, seen by Python's audit hook.

``python -m tests.resume.test_no_pickle FOLDER`` trains, saves, stops, resumes, evaluates, loads the best model, exports
and verifies. From the first step on, until the end, nothing may be unpickled, and nothing that a file in the run's
folder says may be imported, compiled or executed; no file of a kind that holds pickles may be opened there. Whatever
breaks this is recorded; a sabotage breaks it on purpose, at a save. Hooks cannot be removed: hence another process.
"""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from tests.support.command import python
from tests.support.training import StopAt, preempted_at, trainer
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.checkpoint.catalogue import find_newest_intact
from trainer_lib.storage import Store

PICKLED = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt")
PLANTED = "CODE_OF_A_FILE"
found: list[str] = []


class Watch:
    """The audit hook, and what takes the place of functions that unpickle without an event."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.on = False

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Record what must not happen."""
        if not self.on:
            return
        if event == "pickle.find_class":
            found.append(f"{event} {args[0]}.{args[1]}")
        elif event in ("exec", "compile"):
            self._code(event, args)
        elif event == "import" and self.folder in str(args[1]):
            found.append(f"import {args[1]}")
        elif event == "open" and str(args[0]).startswith(self.folder) and str(args[0]).endswith(PICKLED):
            found.append(f"open {args[0]}")

    def _code(self, event: str, args: tuple[Any, ...]) -> None:
        code = args[0]
        if isinstance(code, CodeType):
            if code.co_filename.startswith(self.folder) or PLANTED in code.co_names:
                found.append(f"{event} {code.co_filename}")
        elif PLANTED in (code.decode(errors="replace") if isinstance(code, bytes) else str(code)):
            found.append(f"{event} of a file's text")

    def forbid(self, module: Any, name: str) -> None:
        """Record every call of a function while watching."""
        original: Callable[..., Any] = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                found.append(f"{module.__name__}.{name}")
            return original(*args, **kwargs)

        setattr(module, name, watched)

    def forbid_unpickler(self) -> None:
        """Record every use of pickle's reader, which others may also inherit from."""
        watch = self

        class Watched(pickle.Unpickler):
            def load(self) -> Any:
                if watch.on:
                    found.append("pickle.Unpickler")
                return super().load()

        pickle.Unpickler = Watched  # type: ignore[misc]


class Sabotage(TrainerCallback):
    """Does everything that is forbidden, at the first save."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        code, weights = self.folder / "modeling.py", self.folder / "weights.pt"
        code.write_text(f"{PLANTED} = 1\nprint({PLANTED})\n")
        torch.save({"a": torch.ones(1)}, weights)
        weights.read_bytes()
        torch.load(weights, weights_only=True)
        pickle.loads(pickle.dumps([1, 2]))
        pickle.Unpickler(io.BytesIO(pickle.dumps(Path()))).load()
        exec(code.read_text())
        spec = importlib.util.spec_from_file_location("modeling", code)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def life(folder: Path, callbacks: Sequence[TrainerCallback]) -> None:
    rows = [{"x": torch.randn(6), "labels": torch.tensor(n % 3)} for n in range(16)]
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2}
    settings |= {"eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2, "eval_dataset": rows[:4]}

    def made(*more: TrainerCallback) -> Trainer:
        return trainer(folder, rows, callbacks=[*callbacks, *more], **settings)

    assert preempted_at(made(StopAt(3))) == 3
    again = made()
    again.train(resume_from_checkpoint=True)
    again.evaluate()
    again.save_model(str(folder / "export"))
    assert find_newest_intact(Store.open(folder), on_damage=found.append) is not None


def main(folder: Path) -> None:
    """Live unwatched, for what torch and others load at a first step; watched; and watched with a sabotage."""
    watch = Watch(folder / "run")
    sys.addaudithook(watch.hook)
    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        watch.forbid(module, name)
    watch.forbid_unpickler()
    seen = []
    for name, callbacks in (("warm", []), ("run", []), ("run/sabotaged", [Sabotage(folder / "run")])):
        watch.on = name != "warm"
        life(folder / name, callbacks)
        watch.on = False
        seen.append(found.copy())
        found.clear()
    print(json.dumps(seen))


def test_nothing_is_unpickled_and_no_file_is_run(tmp_path: Path) -> None:
    done = python("-W", "ignore", "-m", "tests.resume.test_no_pickle", tmp_path)
    _, watched, sabotaged = json.loads(done.stdout.splitlines()[-1])
    assert watched == []
    signs = ("torch.load", "pickle.loads", "pickle.Unpickler", "pickle.find_class pathlib", "exec <string>", "open ")
    for sign in (*signs, f"exec {tmp_path}/run/modeling.py"):
        assert any(line.startswith(sign) for line in sabotaged), (sign, sabotaged)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
