"""Arguments survive JSON, YAML, dictionaries and the command line unchanged, and files mean what was meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_lib.arguments import (
    ArgumentParser,
    OptimizerNames,
    SchedulerType,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from trainer_lib.arguments.coerce import coerce
from trainer_lib.base.yaml_text import dump_yaml, parse_yaml

_names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12).filter(
    lambda text: text.lower() not in ("none", "null", "~") and not text.startswith("-")
)
_changes = st.fixed_dictionaries(
    {},
    optional={
        "run_name": _names,
        "learning_rate": st.floats(1e-9, 10),
        "num_train_epochs": st.floats(0.01, 100),
        "warmup_steps": st.one_of(st.integers(0, 10**6), st.floats(0, 0.99)),
        "max_steps": st.integers(10**7, 10**8),
        "save_steps": st.one_of(st.integers(1, 10**6), st.floats(0.001, 0.99)),
        "optim": st.sampled_from(
            [each.value for each in OptimizerNames if not each.value.endswith(("_layerwise", "_xla"))]
        ),
        "lr_scheduler_type": st.sampled_from(["linear", "cosine", "inverse_sqrt"]),
        "lr_scheduler_kwargs": st.dictionaries(
            st.from_regex(r"[a-z]{1,8}", fullmatch=True),
            st.one_of(st.integers(), st.booleans(), st.floats(-1e6, 1e6)),
            max_size=3,
        ),
        "bf16": st.booleans(),
        "tf32": st.one_of(st.none(), st.booleans()),
        "logging_nan_inf_filter": st.booleans(),
        "eval_strategy": st.sampled_from(["no", "steps", "epoch"]),
        "label_names": st.one_of(
            st.none(), st.lists(_names.filter(lambda t: "," not in t and "[" not in t), min_size=1, max_size=3)
        ),
        "report_to": st.lists(st.sampled_from(["jsonl", "mlflow", "wandb"]), unique=True, min_size=1),
        "fsdp": st.sampled_from(["", "full_shard auto_wrap"]),
        "resume_from_checkpoint": st.sampled_from([None, True, "auto", "s3://bucket/run/checkpoint-10"]),
        "debug": st.sampled_from(["", "underflow_overflow"]),
        "save_total_limit": st.one_of(st.none(), st.integers(1, 100)),
    },
).filter(lambda changes: not changes.get("fsdp") or changes.get("optim", "sgd") in ("sgd", "adamw_torch"))
PARSER = ArgumentParser(TrainingArguments, exit_on_error=False)


@settings(max_examples=40)
@given(_changes)
def test_json_and_dictionaries(changes: dict[str, Any]) -> None:
    """Also YAML and the command line."""
    args = TrainingArguments("out", **changes)
    assert TrainingArguments.from_dict(args.to_dict()) == args
    assert TrainingArguments.from_dict(json.loads(args.to_json_string())) == args
    assert TrainingArguments.from_dict(parse_yaml(dump_yaml(args.to_dict()))) == args
    words = ["--output_dir", "out"]
    for name, value in changes.items():
        if isinstance(value, list):
            words += [f"--{name}", *value]
        else:
            words += [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]
    assert PARSER.parse_args_into_dataclasses(words) == (args,)


def test_files(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments("out", learning_rate=1e-3, predict_with_generate=True)
    (tmp_path / "args.json").write_text(args.to_json_string())
    (tmp_path / "args.yaml").write_text(dump_yaml(args.to_dict()))
    assert Seq2SeqTrainingArguments.from_file(tmp_path / "args.json") == args
    assert Seq2SeqTrainingArguments.from_file(str(tmp_path / "args.yaml")) == args


@pytest.mark.parametrize(
    ("text", "field_name", "expected"),
    [
        ("learning_rate: 1e-3", "learning_rate", 1e-3),
        ("eval_strategy: no", "eval_strategy", "no"),
        ("save_strategy: no", "save_strategy", "no"),
        ("include_num_input_tokens_seen: no", "include_num_input_tokens_seen", "no"),
        ("include_num_input_tokens_seen: true", "include_num_input_tokens_seen", "all"),
        ('bf16: "true"', "bf16", True),
        ("bf16: yes", "bf16", True),  # text in YAML 1.2, and a truth value where one is declared
        ("tf32: off", "tf32", False),
        ("lr_scheduler_kwargs: {smooth: no, eta: 1e-3}", "lr_scheduler_kwargs", {"smooth": False, "eta": 1e-3}),
        ("seed: 010", "seed", 10),
        ("run_name: 2024_01", "run_name", "2024_01"),
        ("run_name: 12:30", "run_name", "12:30"),
        ('max_steps: "1e3"', "max_steps", 1000),
        ("num_train_epochs: 3", "num_train_epochs", 3.0),
        ("save_steps: 100.0", "save_steps", 100),
        ('tf32: "none"', "tf32", None),
        ("run_name: none", "run_name", None),
        ("report_to: none", "report_to", []),
        ("report_to: jsonl, mlflow", "report_to", ["jsonl", "mlflow"]),
        ("label_names: [a, b]", "label_names", ["a", "b"]),
        ("label_names: a", "label_names", ["a"]),
        ("lr_scheduler_kwargs: '{\"num_cycles\": 2}'", "lr_scheduler_kwargs", {"num_cycles": 2}),
        ("deepspeed: ds.json", "deepspeed", "ds.json"),
        ("fsdp: true", "fsdp", "full_shard"),
        ("fsdp: [full_shard, offload]", "fsdp", "full_shard offload"),
        ('resume_from_checkpoint: "true"', "resume_from_checkpoint", True),
        ("resume_from_checkpoint: auto", "resume_from_checkpoint", "auto"),
        ("lr_scheduler_type: COSINE", "lr_scheduler_type", SchedulerType.COSINE),
        ("hub_token: <HUB_TOKEN>", "hub_token", None),
    ],
)
def test_what_files_hold_becomes_what_was_meant(text: str, field_name: str, expected: Any) -> None:
    value = getattr(TrainingArguments.from_dict({"output_dir": "out", **parse_yaml(text)}), field_name)
    assert value == expected
    assert type(value) is type(expected) or isinstance(value, str)


def test_numbers_of_numpy_become_plain_ones() -> None:
    untyped: Any = TrainingArguments
    args = untyped("out", learning_rate=np.float32(0.5), seed=np.int64(3), warmup_steps=np.float64(0.1))
    assert (type(args.learning_rate), type(args.seed), type(args.warmup_steps)) == (float, int, float)
    json.loads(args.to_json_string())


def test_sanitized_values_are_numbers_truth_values_or_texts() -> None:
    values = TrainingArguments("out", label_names=["a"], lr_scheduler_kwargs={"a": 1}).to_sanitized_dict()
    assert all(isinstance(value, (bool, int, float, str)) for value in values.values())
    assert values["train_batch_size"] == 8


def test_an_object_with_to_dict_is_written_as_its_dictionary() -> None:
    class Generation:
        def to_dict(self) -> dict[str, Any]:
            return {"num_beams": 4}

    args = Seq2SeqTrainingArguments("out", generation_config=Generation())
    assert args.to_dict()["generation_config"] == {"num_beams": 4}
    assert coerce(Generation(), dict[str, Any] | None, field="accelerator_config") == {"num_beams": 4}


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("3", int | float, 3),
        ("0.5", int | float, 0.5),
        ("a,b", list[str], ["a", "b"]),
        ("[1, 2]", list[int], [1, 2]),
        ((1, "2"), tuple[int, ...], (1, 2)),
        ("none", str | None, None),
        ("1", bool, True),
        (None, int | None, None),
        ("anything", Any, "anything"),
        ("false", str | Literal[False] | None, False),
    ],
)
def test_coercion_by_type(value: Any, hint: Any, expected: Any) -> None:
    result = coerce(value, hint, field="x")
    assert result == expected and type(result) is type(expected)
