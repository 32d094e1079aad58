"""The argument classes and parsers of TRL and sentence-transformers, derived from our arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import clients
from tests.support.repository import ROOT

pytestmark = [pytest.mark.needs("clients"), pytest.mark.timeout(300)]

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
