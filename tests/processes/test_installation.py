"""`install`: a library that imports transformers' Trainer by itself, each time in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.command import python

LIBRARY = """
from dataclasses import dataclass, field

import torch
import transformers
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import WandbCallback
from transformers.trainer import Trainer as SameTrainer
from transformers.trainer_callback import ProgressCallback, TrainerState
from transformers.trainer_seq2seq import Seq2SeqTrainer
from transformers.trainer_utils import IntervalStrategy, get_last_checkpoint
from transformers.training_args import ParallelMode


@dataclass
class Config(TrainingArguments):
    learning_rate: float = field(default=0.25, metadata={"help": "Its own."})
    beta: float = field(default=0.1, metadata={"help": "Added."})


class Counting(TrainerCallback):
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


class LibraryTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(inputs["x"]).square().mean() * self.args.beta
        return (loss, {"loss": loss}) if return_outputs else loss
"""

TRAIN = """
import json, sys
import trainer_lib
trainer_lib.install()
import torch, transformers, a_library
from a_library import *

rows = [{"x": torch.ones(2)} for _ in range(4)]
args = Config("out", max_steps=2, per_device_train_batch_size=2, use_cpu=True, save_strategy="no",
              remove_unused_columns=False, label_names=[])
counting = Counting()
trainer = LibraryTrainer(torch.nn.Linear(2, 1), args, train_dataset=rows, callbacks=[counting])
trainer.train()
ours = [
    transformers.Trainer is trainer_lib.Trainer, SameTrainer is trainer_lib.Trainer,
    TrainingArguments is trainer_lib.TrainingArguments, TrainerState is trainer_lib.TrainerState,
    Seq2SeqTrainer is trainer_lib.Seq2SeqTrainer, IntervalStrategy is trainer_lib.IntervalStrategy,
    get_last_checkpoint is trainer_lib.get_last_checkpoint, WandbCallback is trainer_lib.WandbCallback,
    args.parallel_mode == ParallelMode.NOT_PARALLEL, EvalPrediction is trainer_lib.EvalPrediction,
]
words = "--output_dir o --evaluation_strategy epoch --no_cuda --sharded_ddp --gradient_checkpointing --warmup_ratio 0.1"
(old,) = transformers.HfArgumentParser(Config).parse_args_into_dataclasses(words.split(), look_for_args_file=False)
ours += [old.eval_strategy == "epoch", old.use_cpu, old.fsdp == "shard_grad_op", old.gradient_checkpointing is True,
         old.warmup_steps == 0.1, isinstance(old, Config)]
trainer_lib.uninstall()
names = [type(each).__name__ for each in trainer.callback_handler.callbacks]
back = [transformers.Trainer.__module__, transformers.trainer_utils.IntervalStrategy.__module__,
        transformers.integrations.WandbCallback.__module__, transformers.Seq2SeqTrainingArguments.__module__]
trainer_lib.uninstall()
print(json.dumps([ours, counting.steps, args.learning_rate, names, back]))
"""

# Each attempt is a fork of a process in which nothing but transformers itself has its Trainer.
REFUSED = """
import json, os, trainer_lib, transformers.trainer
from trainer_lib.errors import ConfigError

for before in {befores!r}:
    child = os.fork()
    if child == 0:
        exec(before)
        import transformers
        try:
            trainer_lib.install()
        except ConfigError as error:
            untouched = transformers.Trainer.__module__ == "transformers.trainer"
            print(json.dumps([error.field, error.value, str(error), untouched]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
IMPORTED_BEFORE = {
    "import a_library": ("a_library", "before the first import of a_library"),
    "from transformers import TrainingArguments": ("__main__", "before that script's other imports"),
    "import transformers\nkept = [type('Derived', (transformers.Trainer,), {'__module__': 'hidden.part'})]": (
        "hidden.part",
        "before the first import of hidden",
    ),
}


def _lines(program: str, folder: Path) -> list[Any]:
    (folder / "a_library.py").write_text(LIBRARY)
    lines = python("-c", program, cwd=folder).stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith(("[", '"'))]


def test_a_library_that_imports_the_trainer_by_itself_trains_with_ours(tmp_path: Path) -> None:
    ours, steps, learning_rate, callbacks, back = _lines(TRAIN, tmp_path)[-1]
    assert all(ours), ours
    assert (steps, learning_rate) == (2, 0.25)
    assert callbacks == ["DefaultFlowCallback", "Counting"]
    assert all(module.startswith("transformers.") for module in back), back


def test_a_block_ends_the_replacement_and_a_second_call_changes_nothing(tmp_path: Path) -> None:
    program = """
import json, trainer_lib, transformers
with trainer_lib.install():
    with trainer_lib.install():
        pass
    inside = transformers.Trainer is trainer_lib.Trainer
theirs = transformers.Trainer is transformers.trainer.Trainer and transformers.Trainer is not trainer_lib.Trainer
from pathlib import Path
from transformers.utils.import_utils import direct_transformers_import
with trainer_lib.install():
    again = transformers.trainer.Trainer is trainer_lib.Trainer
    direct_transformers_import(Path(transformers.__file__).parent)  # transformers replaces itself at some imports
    import transformers as another
    again = again and another is not transformers and another.Trainer is trainer_lib.Trainer
theirs = theirs and another.Trainer is transformers.Trainer is transformers.trainer.Trainer
print(json.dumps([inside, theirs, again, "Trainer" in dir(transformers)]))
"""
    assert _lines(program, tmp_path)[-1] == [True, True, True, True]


def test_a_library_that_was_imported_before_is_named(tmp_path: Path) -> None:
    answers = _lines(REFUSED.format(befores=list(IMPORTED_BEFORE)), tmp_path)
    for (holder, remedy), answer in zip(IMPORTED_BEFORE.values(), answers, strict=True):
        field, value, text, untouched = answer
        assert (field, value, untouched) == ("trainer_lib.install", holder, True)
        assert f"Call trainer_lib.install() {remedy}." in text


def test_without_transformers_there_is_nothing_to_replace(tmp_path: Path) -> None:
    program = """
import json, sys, importlib.util, trainer_lib
from trainer_lib.errors import MissingExtraError
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "transformers" else found(name, *more)
try:
    trainer_lib.install()
except MissingExtraError as error:
    print(json.dumps(str(error)))
"""
    assert 'pip install "trainflow[transformers]"' in _lines(program, tmp_path)[-1]
