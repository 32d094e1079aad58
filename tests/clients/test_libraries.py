"""Client libraries that subclass the Trainer: they do on ours what they do on that of transformers."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import clients
from tests.support.chat_cases import FAMILIES
from tests.support.client_table import PAGE, differences, log_differences, resumed_differences, row
from tests.support.clients import Runs, run_cases, run_module, run_side
from tests.support.repository import ROOT
from tests.support.trl_cases import CASES
from tests.support.trl_scripts import SCRIPTS

pytestmark = [pytest.mark.needs("clients"), pytest.mark.timeout(900)]
SENTENCES = "sentence-transformers"
#: Library -> its cases. Those of sentence-transformers are read: their module imports the library.
NAMES = {
    "TRL": [case.name for case in CASES],
    SENTENCES: re.findall('_case[(]"(.+)"', (ROOT / "tests/support/sentence_cases.py").read_text(encoding="utf-8")),
}
#: Theirs divides the steps of a stream by `max_steps`, ours counts its passes (docs/migration.md).
EPOCHS = ": epoch is"
# Ours writes a class as text and `accelerator_config` as given; theirs changes the pinning where there is no GPU.
SHOWN_OTHERWISE = {"accelerator_config", "batch_sampler", "dataloader_pin_memory"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    @functools.cache
    def run(library: str) -> Runs:
        found = run_cases(library, tmp_path_factory.mktemp("client"))
        assert list(found.ours) == NAMES[library]
        return found

    return run


@pytest.mark.parametrize(("library", "name"), [(library, name) for library, names in NAMES.items() for name in names])
def test_a_trainer_trains_evaluates_saves_resumes_and_loads_as_its_row_in_the_documentation_says(
    library: str, name: str, runs: Callable[[str], Runs]
) -> None:
    found = runs(library)
    known = EPOCHS if name.endswith("streaming") else "none"
    assert [text for text in differences(found.ours[name], found.transformers[name]) if known not in text] == []
    written = row(name, found.ours[name], found.transformers[name])
    assert written in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", NAMES[SENTENCES])
def test_what_it_saved_encodes_equally_and_its_card_says_the_same(name: str, runs: Callable[[str], Runs]) -> None:
    found = runs(SENTENCES)
    (ours, resumed), (theirs, _) = found.ours[name]["looks"], found.transformers[name]["looks"]
    assert ours["encoded"] == 0
    assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-3)
    assert resumed["weights"] == pytest.approx(ours["weights"], abs=1e-6)  # those of the loss as well
    for what in ("best", "card", "curve"):
        assert ours[what] == theirs[what], what
    assert set(ours["settings"]) ^ set(theirs["settings"]) <= SHOWN_OTHERWISE


def test_two_processes_train_like_one(runs: Callable[[str], Runs], tmp_path: Path) -> None:
    name = "SFTTrainer, conversations"
    both = run_side("TRL", "ours", tmp_path / "both", only=name, processes=2)[name]
    assert both["errors"] == {}
    assert resumed_differences({"resumed": both["logs"], "logs": runs("TRL").ours[name]["logs"]}) == []
    assert resumed_differences(both) == []


def test_two_processes_log_what_they_log_with_transformers(tmp_path: Path) -> None:
    name = NAMES[SENTENCES][0]
    ours, theirs = (
        run_side(SENTENCES, side, tmp_path / side, only=name, processes=2)[name] for side in ("ours", "transformers")
    )
    assert (ours["errors"], theirs["errors"]) == ({}, {})
    assert log_differences(ours["logs"], theirs["logs"]) == []
    assert resumed_differences(ours) == []


# -------------------------------------------------------------------------------------------- TRL's own scripts by name
@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {side: tmp_path_factory.mktemp(side) for side in ("ours", "transformers")}
    for side, folder in made.items():
        done = run_module("tests.support.trl_scripts", side, str(folder), output=folder)
        assert done.returncode == 0, done.stderr[-4000:]
    return made


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_logs_the_same_figures_and_leaves_the_same_model_behind(script: str, folders: dict[str, Path]) -> None:
    ours, theirs = (folders[side] / script for side in ("ours", "transformers"))
    histories = [
        json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        for folder in (ours, theirs)
    ]
    assert len(histories[1]) == 6
    assert log_differences(*histories) == []
    written = {"training_args.bin", "training_args.json"}
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()} ^ written


# -------------------------------------------------------------------------------------- conversations and their loss
def test_the_loss_of_conversations_is_that_of_trl_on_the_same_batch_by_the_template_of_every_family(
    tmp_path: Path,
) -> None:
    done = run_module("tests.support.chat_cases", str(tmp_path / "answer.json"), output=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))
    assert len(losses) == 2 * len(FAMILIES)
    for name, (of_trl, *of_ours) in losses.items():
        assert of_ours == pytest.approx([of_trl, of_trl], rel=0, abs=1e-6), name


def test_losses_of_judged_answers_are_those_of_trl(tmp_path: Path) -> None:
    done = run_module("tests.support.judged_cases", str(tmp_path / "answer.json"), output=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))
    assert list(losses) == ["dpo", "orpo", "kto", "reward"]
    for name, (of_trl, of_ours) in losses.items():
        assert of_ours == pytest.approx(of_trl, rel=0, abs=1e-6), name


# ---------------------------------------------------------------------------- argument classes and parsers of both
#: Every configuration is made, written as JSON, made again, and asked for what its Trainer reads.
CONFIGURATIONS = """
import dataclasses, json
import trainer_lib
trainer_lib.install()
import sentence_transformers, trl

found = {}
for cls in (trl.SFTConfig, trl.DPOConfig, trl.RewardConfig, trl.KTOConfig,
            sentence_transformers.SentenceTransformerTrainingArguments,
            sentence_transformers.CrossEncoderTrainingArguments,
            sentence_transformers.SparseEncoderTrainingArguments):
    args = cls("out", use_cpu=True, bf16=False)
    values = json.loads(json.dumps(args.to_dict()))
    again = dataclasses.replace(cls(**values), seed=7)
    asked = (args.deepspeed_plugin, args.accelerator_config.dispatch_batches, args.distributed_state.distributed_type)
    found[cls.__name__] = [
        issubclass(cls, trainer_lib.TrainingArguments), cls(**values).to_dict() == values, again.seed, asked
    ]
print(json.dumps(found))
"""
PARSERS = """
import json, sys
import trainer_lib
trainer_lib.install()
from transformers import HfArgumentParser
from trl import SFTConfig, TrlParser

words = ["--max_length", "32", "--bf16", "false", "--packing", "--use_cpu",
         "--model_init_kwargs", '{"dtype": "float32"}',
         "--lr_scheduler_kwargs", '{"num_cycles": "2"}', "--report_to", "none", "--save_steps", "0.5"]
with open("config.yaml", "w") as file:
    file.write("output_dir: y\\nlearning_rate: 1.0e-4\\nwarmup_steps: 0.1\\n")
(of_trl,) = TrlParser(SFTConfig).parse_args_and_config(["--config", "config.yaml", *words])
given = ["--output_dir", "y", "--learning_rate", "1e-4", "--warmup_steps", "0.1", *words]
(of_theirs,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(given, look_for_args_file=False)
(of_ours,) = trainer_lib.HfArgumentParser(SFTConfig).parse_args_into_dataclasses(given)
for parser in (TrlParser(SFTConfig), trainer_lib.HfArgumentParser(SFTConfig)):
    parser.format_help()
print(json.dumps([each.to_dict() for each in (of_trl, of_theirs, of_ours)]))
"""
ADOPTED = """
import json
import sentence_transformers, trl
from trainer_lib.arguments.foreign_arguments import adopt_arguments

found = []
for args in (trl.SFTConfig("out", use_cpu=True, bf16=False, max_length=32),
             sentence_transformers.SentenceTransformerTrainingArguments("out", use_cpu=True, seed=7)):
    adopted = adopt_arguments(args)
    adopted.validate()
    theirs, ours = args.to_dict(), adopted.to_dict()
    found.append({name: [value, ours.get(name)] for name, value in theirs.items() if ours.get(name) != value})
import trainer_lib
from trainer_lib.errors import ConfigError
try:
    trainer_lib.install()
except ConfigError as error:
    found.append(str(error))
print(json.dumps(found))
"""


def _run(program: str, working: Path) -> Any:
    before = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.path.append({str(clients.folder())!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", before + program], cwd=working, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_their_configurations_derive_from_our_arguments(tmp_path: Path) -> None:
    found = _run(CONFIGURATIONS, tmp_path)
    assert len(found) == 7
    assert set(map(json.dumps, found.values())) == {json.dumps([True, True, 7, [None, None, "NO"]])}


def test_their_parsers_take_our_fields(tmp_path: Path) -> None:
    of_trl, of_theirs, of_ours = _run(PARSERS, tmp_path)
    assert of_trl == of_theirs == of_ours
    assert (of_ours["max_length"], of_ours["packing"], of_ours["save_steps"]) == (32, True, 0.5)
    assert of_ours["model_init_kwargs"] == {"dtype": "float32"}
    assert of_ours["lr_scheduler_kwargs"] == {"num_cycles": 2}


def test_their_configurations_are_converted_where_nothing_is_installed(tmp_path: Path) -> None:
    *differences, refusal = _run(ADOPTED, tmp_path)
    # Texts that only mask a secret, and settings whose default differs on purpose.
    known = {"accelerator_config", "activation_checkpointing", "dataloader_pin_memory", "disable_tqdm"}
    known |= {"enable_jit_checkpoint", "fsdp", "gradient_checkpointing", "hub_token", "eos_token", "pad_token"}
    for found in differences:
        assert set(found) <= known, found
    assert "before the first import of sentence_transformers and the first import of trl" in refusal


# ------------------------------------------------------------------------------------------- optimizers and versions
def test_a_restored_optimizer_trains_as_one_that_was_never_saved(tmp_path: Path) -> None:
    """Every optimizer of pytorch_optimizer that works on a CPU, or it is refused."""
    done = run_module("tests.support.optimizer_cases", str(tmp_path / "answer.json"), output=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))
    kinds = {name: outcome.split(":")[0] for name, outcome in outcomes.items()}
    assert [name for name, kind in kinds.items() if kind not in ("equal", "refused", "not made")] == []
    # Objects of a class of theirs cannot be saved without pickle.
    assert {name.split(",")[0] for name, kind in kinds.items() if kind == "refused"} <= {"conda", "scalableshampoo"}
    assert sum(kind == "equal" for kind in kinds.values()) > 700


def test_the_clients_are_the_pinned_ones_and_what_they_need_is_here_in_a_version_that_they_take() -> None:
    found = {canonicalize_name(client.metadata["Name"]): client.version for client in clients.distributions()}
    assert found == {canonicalize_name(name): version for name, version in clients.pins().items()}
    for client in clients.distributions():
        for text in client.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                version = importlib.metadata.version(needed.name)
                assert version in needed.specifier, f"{client.metadata['Name']} needs {text}; {version} is installed"
