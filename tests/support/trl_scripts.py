"""TRL's own scripts as a user starts them, all in one process of the clients.

python -m tests.support.trl_scripts ours|transformers <folder>
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import tiny_models
from tests.support.client_cases import use_our_trainer
from tests.support.trl_cases import RUN, chats, pairs, rewarder, tokenizer

#: Script -> (model, data) below the folder.
SCRIPTS = {"sft": ("decoder", "chats"), "dpo": ("decoder", "pairs"), "reward": ("rewarder", "pairs")}


def make_inputs(folder: Path) -> None:
    for name, model in (("decoder", tiny_models.llama()), ("rewarder", rewarder())):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    for name, rows in (("chats", chats()), ("pairs", pairs())):
        rows.to_json(folder / name / "train.jsonl")
        rows.select(range(5)).to_json(folder / name / "test.jsonl")


def command_line(folder: Path, script: str) -> list[str]:
    """The words of a script's command line, as its parser takes them."""
    model, data = SCRIPTS[script]
    given: dict[str, Any] = {**RUN, "model_name_or_path": folder / model, "dataset_name": folder / data}
    given |= {"output_dir": folder / script, "max_length": 16, "dtype": "float32"}
    return list(_words(given))


def _words(given: dict[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        yield f"--{name}"
        yield str(value)


def main(side: str, folder: str) -> None:
    if side == "ours":
        use_our_trainer()
    make_inputs(Path(folder))
    for script in SCRIPTS:
        with mock.patch.object(sys, "argv", [script, *command_line(Path(folder), script)]):
            runpy.run_module(f"trl.scripts.{script}", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
