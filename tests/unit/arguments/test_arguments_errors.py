"""Every refused argument names its field, its value and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT
from trainer_lib.arguments import OptimizerNames, Seq2SeqTrainingArguments, TrainingArguments
from trainer_lib.arguments.fields import declarations
from trainer_lib.errors import ConfigError

#: The class without its types: what is refused here, a type checker would refuse already.
Untyped: Any = TrainingArguments
BEST = {"load_best_model_at_end": True}
STEPS = {**BEST, "eval_strategy": "steps"}

#: Arguments -> the field and the value that the error begins with, and words of its remedy.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"learning_rate": "abc"}, "learning_rate = abc … number"),
    ({"learning_rate": True}, "learning_rate = True"),
    ({"learning_rate": float("nan")}, "learning_rate = nan"),
    ({"learning_rate": [1]}, "learning_rate = [1]"),
    ({"num_train_epochs": None}, "num_train_epochs = none"),
    ({"max_steps": 0}, "max_steps = 0"),
    ({"max_steps": 2.5}, "max_steps = 2.5"),
    ({"seed": "x"}, "seed = x"),
    ({"gradient_accumulation_steps": 2, "global_batch_size": 32}, "gradient_accumulation_steps = 2"),
    ({"warmup_steps": 2.5}, "warmup_steps = 2.5"),
    ({"optim": "adamw_troch"}, "optim = adamw_troch … Did you mean"),
    ({"optim": 3}, "optim = 3"),
    ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type = cosin"),
    ({"lr_scheduler_kwargs": "num_cycles=2"}, "lr_scheduler_kwargs = num_cycles=2"),
    ({"lr_scheduler_kwargs": "{num_cycles: 2}"}, "lr_scheduler_kwargs = {num_cycles: 2}"),
    ({"fp16": True, "bf16": True}, "fp16 = True … Keep bf16"),
    ({"fp16_full_eval": True, "bf16_full_eval": True}, "fp16_full_eval = True"),
    ({"bf16": "maybe"}, "bf16 = maybe … true"),
    ({"logging_steps": 0}, "logging_steps = 0"),
    ({"logging_steps": 1.5}, "logging_steps = 1.5"),
    ({"save_steps": 0}, "save_steps = 0"),
    ({"eval_strategy": "step"}, "eval_strategy = step … steps"),
    ({"eval_strategy": True}, "eval_strategy = True"),
    ({"save_strategy": "never"}, "save_strategy = never"),
    ({"save_strategy": "best", "eval_strategy": "epoch"}, "metric_for_best_model = none … Give a metric's name"),
    ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy = best"),
    (BEST, 'load_best_model_at_end = True … Give eval_strategy="steps"'),
    ({**BEST, "eval_strategy": "epoch"}, 'save_strategy = steps … Give save_strategy="epoch"'),
    ({**STEPS, "eval_steps": 3, "save_steps": 10}, "save_steps = 10 … a multiple"),
    ({**STEPS, "eval_steps": 0.1, "save_steps": 10}, "save_steps = 10"),
    ({**STEPS, "eval_steps": 0.2, "save_steps": 0.5}, "save_steps = 0.5"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type = reduce_lr_on_plateau"),
    ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type = greedy"),
    ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor = 2"),
    ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers = True"),
    ({"dataloader_multiprocessing_context": "thread"}, "dataloader_multiprocessing_context = thread"),
    ({"train_sampling_strategy": "by_length"}, "train_sampling_strategy = by_length"),
    ({"include_for_metrics": ["input"]}, "include_for_metrics = input"),
    ({"include_num_input_tokens_seen": "some"}, "include_num_input_tokens_seen = some"),
    ({"log_level": "loud"}, "log_level = loud"),
    ({"report_to": "mflow"}, "report_to = mflow"),
    ({"debug": "overflow"}, "debug = overflow"),
    ({"fsdp": "full_shrad"}, "fsdp = full_shrad"),
    ({"fsdp": "offload"}, "fsdp = offload"),
    ({"fsdp": "full_shard", "deepspeed": "ds.json"}, "fsdp = full_shard … Keep one"),
    ({"deepspeed": ""}, 'deepspeed = ""'),
    ({"ddp_backend": "glue"}, "ddp_backend = glue"),
    ({"hub_strategy": "always"}, "hub_strategy = always"),
    ({"run_name": 2024}, "run_name = 2024"),
    ({"output_dir": 3}, "output_dir = 3"),
]
BOUNDS = {name: known.bounds for name, known in declarations(Seq2SeqTrainingArguments).items() if known.bounds}


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_a_refusal_names_field_value_and_remedy(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(**{"output_dir": "out", **given})
    error = caught.value
    said, *words = said.split(" … ")
    assert f"{error.field} = {error.value}" == said and error.exit_code == 2
    assert str(error).startswith(f"{said}: ") and all(word in str(error.remedy) for word in words or [" "])


@pytest.mark.parametrize("name", BOUNDS)
def test_every_bound_is_kept(name: str) -> None:
    for sign, bound in BOUNDS[name].items():
        beyond: Any = {"ge": bound - 1, "gt": bound, "le": bound + 1, "lt": bound}[sign]
        with pytest.raises(ConfigError) as caught:
            Seq2SeqTrainingArguments("out", **{name: beyond})
        assert (caught.value.field, float(caught.value.value or "nan")) == (name, beyond) and caught.value.remedy


def test_what_is_refused_of_the_documents_about_the_trainer_has_its_row_in_the_page_about_moving() -> None:
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    sections = ("the section `amp`", "`fsdp_config` with `xla`", "`save_safetensors=False`", "`mp_parameters`")
    rows = [*(f"| {row}" for row in (*sections, "optimizers that end in `_layerwise`")), "`jit_mode_eval`"]
    assert [row for row in rows if row not in page] == []


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        Untyped("out", learning_rat=1.0)
    assert caught.value.field == "learning_rat" and caught.value.remedy == 'Did you mean "learning_rate"?'
    with pytest.raises(ConfigError, match="Remove it"):
        Untyped("out", zzz=1)


def test_from_dict_puts_the_place_before_the_field() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingArguments.from_dict({"learning_rate": "abc"})
    assert caught.value.field == "train.args.learning_rate"
    with pytest.raises(ConfigError) as caught:
        TrainingArguments.from_dict({"warmpu_steps": 1}, prefix="sweep.args")
    assert caught.value.field == "sweep.args.warmpu_steps"
    assert "warmup_steps" in (caught.value.remedy or "")


def test_a_secret_is_never_shown() -> None:
    args = TrainingArguments("out", hub_token="s3cr3t")
    shown = [repr(args), str(args), args.to_json_string(), str(args.to_sanitized_dict())]
    assert not any("s3cr3t" in text for text in shown)
    assert args.hub_token == "s3cr3t"
    with pytest.raises(ConfigError) as caught:
        Untyped("out", hub_token=["s3cr3t"])
    assert "s3cr3t" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    for content, words in (
        (None, r"broken\.yaml: The file cannot be read"),
        ("learning_rate: [1", r"broken\.yaml: The file cannot be parsed"),
        ("- 1\n- 2\n", "holds no mapping"),
        ("learning_rate: fast\n", r"^broken\.yaml\.learning_rate"),
    ):
        if content:
            broken.write_text(content)
        with pytest.raises(ConfigError, match=words):
            TrainingArguments.from_file(broken)


def test_an_optimizer_is_found_by_its_value_before_any_others_name() -> None:
    # trainflow knows "lion"; LION is the reference's member name of "lion_32bit"
    assert TrainingArguments("out", optim="lion").optim is OptimizerNames.LION_TORCH
    assert TrainingArguments("out", optim="ADAMW_TORCH").optim is OptimizerNames.ADAMW_TORCH


def test_a_warm_up_that_is_longer_than_training_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"warmup_steps = 20: The warm-up is longer .*max_steps = 10") as caught:
        args = TrainingArguments("out", warmup_steps=20, max_steps=10)
    assert caught[0].filename == __file__
    assert args.get_warmup_steps(10) == 20
