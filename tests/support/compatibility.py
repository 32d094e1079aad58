"""Compatibility with transformers: its rows, the names that need a row, the tests that they cite, and the users' page.

python -m tests.support.compatibility    writes the lists of docs/compatibility.md from tests/data/compatibility.md
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import trainer_lib
from tests.support.repository import ROOT
from tests.support.surface import SURFACE
from trainer_lib import Seq2SeqTrainer, Trainer, TrainingArguments
from trainer_lib.arguments import OptimizerNames
from trainer_lib.arguments.compat import OLD_NAMES
from trainer_lib.arguments.configs.accelerator_config import ACCELERATOR_KEYS
from trainer_lib.arguments.fields import field_map
from trainer_lib.arguments.groups import ArgumentGroups, Seq2SeqArguments
from trainer_lib.arguments.training import TFArguments
from trainer_lib.arguments.validation import REPORTERS
from trainer_lib.trainer.accelerator.trainer_accelerator import TrainerAccelerator

TABLES = ROOT / "tests" / "data" / "compatibility.md"
PAGE = ROOT / "docs" / "compatibility.md"
CALLED: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "trainer_methods.json").read_text(encoding="utf-8"))
_ROW = re.compile(r"\| `([^`]+)` \| (works|refused|works with `[^`]+`) \|(?: (.*))? \| `(tests/[^`]+)` \|")

#: Attributes that the design promises, and that no class declares.
ATTRIBUTES = (
    *("model", "model_wrapped", "is_model_parallel", "place_model_on_device", "is_in_train", "args", "state"),
    *("control", "optimizer", "lr_scheduler", "accelerator", "label_names", "current_gradient_accumulation_steps"),
    *("tokenizer", "hub_model_id", "is_fsdp_enabled", "is_deepspeed_enabled", "deepspeed", "gather_function"),
    *("push_in_progress", "neftune_noise_alpha", "model_accepts_loss_kwargs", "loss_is_scaled_for_ga", "is_tp_enabled"),
    *("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled"),
    "is_distributed_loading_by_transformers",
)
#: What the documents 000 and 001 list of a TFTrainer and its arguments, and what its source had besides.
TF_MEMBERS = (
    *("run_model", "training_step", "prediction_step", "prediction_loop", "get_train_tfdataset", "get_eval_tfdataset"),
    *("get_test_tfdataset", "create_optimizer_and_scheduler", "optimizers", "tb_writer", "apply_gradients", "evaluate"),
    *("predict", "log", "train", "save_model", "setup_wandb", "setup_comet", "distributed_training_steps"),
    "distributed_prediction_steps",
)
TF_PROPERTIES = ("strategy", "n_replicas", "n_gpu")
#: Public methods of the Trainer that serve other parts of the library, not its users.
INTERNAL = {"check_stop", "evaluation_model", "range_dataloader", "spool_folder", "target_items"}
#: What the documents of all ages have, and the newest class has not.
OLDER_METHODS = {"prediction_loop", "init_git_repo", "num_tokens"}
_TITLES = {"batch": "batch and length", "precision": "precision and memory"}
_GROUPS = {
    base.__name__.removesuffix("Arguments").lower(): base for base in (*ArgumentGroups.__mro__[1:-1], Seq2SeqArguments)
}
#: Title of a table -> the group of arguments that it is about.
ARGUMENT_SECTIONS = {_TITLES.get(name, name): group for name, group in _GROUPS.items()}
COLLATORS = {name for name in trainer_lib.__all__ if "ollator" in name}
CALLBACKS = {name for name in trainer_lib.__all__ if "Callback" in name} | {"ExportableState"}


class Row(NamedTuple):
    section: str
    name: str
    status: str
    note: str
    test: str

    @property
    def needs(self) -> str | None:
        return self.status.split("`")[1] if "`" in self.status else None


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return every row, by section. A line of a table that cannot be read as a row is a mistake."""
    found, section = [], ""
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("| ") and not line.startswith("| name |"):
            match = _ROW.fullmatch(line)
            assert match, f"no row: {line}"
            found.append(Row(section, match[1], match[2], match[3] or "", match[4]))
    return tuple(found)


def expected() -> dict[str, set[str]]:
    """Section -> the names that must have a row in it, and no others."""
    methods = {*SURFACE["Trainer_methods"], *CALLED["called"], *CALLED["called_by_users_only"], *OLDER_METHODS}
    members = {name for name in dir(TrainingArguments) if not name.startswith("_")}
    members |= set(SURFACE["TrainingArguments_public_members"])
    members -= {field.name for field in dataclasses.fields(TrainingArguments)}
    trackers = {*REPORTERS, *SURFACE["report_to"], "all", "none"}
    return {
        "Trainer, arguments, results": set(trainer_lib.__all__) - COLLATORS - CALLBACKS,
        "Callbacks": CALLBACKS | set(SURFACE["callbacks_shipped"]) | set(SURFACE["integration_callbacks"]),
        "Data collators": COLLATORS,
        "Constructor": set(inspect.signature(Trainer.__init__).parameters) - {"self"},
        "Public methods": {name for name in methods if not name.startswith("_")} | {"__init__"},
        "Private hooks that subclasses override": {name for name in methods if re.match("_[^_]", name)},
        "Seq2SeqTrainer": {f"Seq2SeqTrainer.{name}" for name in SURFACE["Seq2SeqTrainer_methods"]},
        "TFTrainer": {f"TFTrainer.{name}" for name in TF_MEMBERS},
        "TFTrainingArguments": {f"TFTrainingArguments.{name}" for name in (*field_map(TFArguments), *TF_PROPERTIES)},
        "Attributes": {f"trainer.{name}" for name in ATTRIBUTES}
        | {f"accelerator.{name}" for name in dir(TrainerAccelerator) if not name.startswith("_")},
        **{title: set(inspect.get_annotations(group)) for title, group in ARGUMENT_SECTIONS.items()},
        "accelerator_config": {f"accelerator_config.{key}" for key in ACCELERATOR_KEYS},
        "Members of the arguments": {
            f"args.{name}" for name in {*members, *SURFACE["TrainingArguments_public_members"]}
        },
        "Old names": {*SURFACE["old_args"], *OLD_NAMES},
        "Callback events": set(SURFACE["TrainerCallback_events"]),
        "TrainerState": {f"state.{name}" for name in SURFACE["TrainerState"]},
        "TrainerControl": {f"control.{name}" for name in SURFACE["TrainerControl"]},
        "Choices": {
            f"{enum}.{value}" for enum in ("IntervalStrategy", "SaveStrategy", "HubStrategy") for value in SURFACE[enum]
        },
        "Optimizers (`optim`)": {*SURFACE["OptimizerNames"], *(each.value for each in OptimizerNames)},
        "Schedules (`lr_scheduler_type`)": set(SURFACE["SchedulerType"]),
        "Trackers (`report_to`)": trackers,
    }


def lists() -> str:
    """Return the users' lists: by section, the notes of the names that are not just as in transformers."""
    return "\n\n".join(_paragraphs()).replace("](../../docs/", "](") + "\n"


def _paragraphs() -> Iterator[str]:
    by_section: dict[str, list[Row]] = {}
    for row in rows():
        by_section.setdefault(row.section, []).append(row)
    body = TABLES.read_text(encoding="utf-8").partition("\n## ")[2]
    for text in f"## {body}".split("\n\n"):
        if text.startswith("|"):
            continue
        section = by_section.get(text.lstrip("# "))
        notes = _notes(section) if section else ""
        if notes or not section:
            yield text.strip()
        if notes:
            yield notes


def _notes(section: Iterable[Row]) -> str:
    """A line for every note, with the names that have it."""
    names: dict[str, list[str]] = {}
    for row in section:
        note = f"**refused**; {row.note}" if row.status == "refused" else row.note
        needs = f" (`{row.needs}`)" if row.needs and note else ""
        names.setdefault(note or (f"needs `{row.needs}`" if row.needs else ""), []).append(f"`{row.name}`{needs}")
    names.pop("", None)
    return "\n".join(f"- {', '.join(of_note)}: {note}" for note, of_note in names.items())


def present(name: str) -> bool:
    """Whether a method that the page says works is there."""
    return hasattr(Seq2SeqTrainer if name.startswith("Seq2SeqTrainer.") else Trainer, name.rpartition(".")[2])


@functools.cache
def _tests(path: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def problem(row: Row) -> str | None:
    """What is wrong with the test that a row cites; None when it exists and says the row's name."""
    path, _, name = row.test.partition("::")
    function, _, parameter = name.partition("[")
    if not (ROOT / path).is_file() or function not in _tests(path):
        return "there is no such test"
    if parameter:
        decorators = [ast.unparse(each) for each in _tests(path)[function].decorator_list]
        return None if any("parametrize" in each for each in decorators) else "it has no parameters"
    said = _what_it_says(path, function)
    if row.name in CALLED["called"] and "SURFACE" in said:
        return None  # tests/data/trainer_methods.json, walked
    short = row.name.rpartition(".")[2].strip("_")
    walked = any(word in said for word in ("SURFACE", "EVENTS", "OptimizerNames", "SchedulerType"))
    named = re.search(rf"(?<![A-Za-z0-9]){re.escape(short)}(?![A-Za-z0-9])", said)
    return None if walked or named else "it does not say the name"


@functools.cache
def _what_it_says(path: str, function: str) -> str:
    """The source of a test and of what it may use: all but the module's other tests, and the support modules."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    others = {name for name in _tests(path) if name.startswith("test_")} - {function}
    texts = [ast.unparse(node) for node in tree.body if getattr(node, "name", None) not in others]
    modules = re.findall(r"from tests\.support\.(\w+) import", "\n".join(texts))
    return "\n".join([*texts, *((ROOT / f"tests/support/{name}.py").read_text(encoding="utf-8") for name in modules)])


def main() -> None:
    introduction = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    PAGE.write_text(f"{introduction}\n{lists()}", encoding="utf-8")


if __name__ == "__main__":
    main()
