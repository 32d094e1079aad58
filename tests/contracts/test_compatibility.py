"""tests/data/compatibility.md against the code: every name has its row, every row its test, and what it says is so.

A new argument needs a row there, and a sample value here: in WORKS when no value follows from its default, in REFUSED
when the Trainer does not take it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import runpy
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer_lib
from tests.support import compatibility
from tests.support.compatibility import Row, problem, rows
from tests.support.repository import ROOT
from tests.support.tiny_models import llama
from tests.support.toys import TokenModel, token_rows
from trainer_lib import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TFTrainer,
    TFTrainingArguments,
    Trainer,
    TrainingArguments,
)
from trainer_lib.arguments.compat import OLD_NAMES
from trainer_lib.arguments.fields import field_map
from trainer_lib.arguments.groups import Seq2SeqArguments
from trainer_lib.arguments.training import TFArguments
from trainer_lib.arguments.validation import REPORTERS
from trainer_lib.distributed import communicator as distributed
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.optim import build_optimizer

SECTIONS = compatibility.expected()
TOKENS = token_rows(8)
BEST: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
RECOMPUTED = ("gradient", "activation")

#: What an argument is tried with; a truth value is turned round, a number raised by one.
ALONE = """
run_name=first project=birds resume_from_checkpoint=auto data_seed=1 debug=underflow_overflow use_cpu=True
global_batch_size=6 max_steps=3 learning_rate=0.001 lr_scheduler_type=cosine optim=sgd optim_target_modules=all-linear
adam_beta1=0.8 adam_beta2=0.99 adam_epsilon=1e-06 label_smoothing_factor=0.1 loss_spike_sigma=6.0
neftune_noise_alpha=5.0 tf32=False torch_compile_backend=eager torch_compile_mode=reduce-overhead
torch_empty_cache_steps=2 logging_strategy=epoch include_num_input_tokens_seen=all log_level=error
log_level_replica=error report_to=jsonl logging_dir=logs eval_strategy=epoch eval_accumulation_steps=2
save_strategy=epoch save_total_limit=2 hub_model_id=memory://compatibility/hub hub_strategy=end hub_token=t
hub_revision=v1 dataloader_multiprocessing_context=spawn train_sampling_strategy=sequential length_column_name=size
ddp_backend=gloo ddp_bucket_cap_mb=4 evaluation_strategy=epoch per_gpu_train_batch_size=4 per_gpu_eval_batch_size=4
warmup_ratio=0.1 push_to_hub_model_id=it push_to_hub_token=t torchdynamo=eager fp16_backend=apex xpu_backend=gloo
use_ipex=True half_precision_backend=auto include_inputs_for_metrics=True adafactor=True group_by_length=True
no_cuda=True use_mps_device=True split_batches=True
"""


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


#: The same, with whatever else it needs.
WORKS: dict[str, dict[str, Any]] = {
    **{name: {name: _value(text)} for name, _, text in (word.partition("=") for word in ALONE.split())},
    "output_dir": {},
    "full_determinism": {},  # switches torch for the rest of the process; its own test puts that back
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}},
    "optim_args": {"optim": "sgd", "optim_args": "momentum=0.9"},
    **{
        f"{name}_checkpointing_kwargs": {f"{name}_checkpointing_kwargs": {"use_reentrant": True}} for name in RECOMPUTED
    },
    "eval_steps": {"eval_strategy": "steps", "eval_steps": 2},
    "include_for_metrics": {"include_for_metrics": ["inputs"]},
    "metric_for_best_model": {**BEST, "metric_for_best_model": "loss"},
    "greater_is_better": {**BEST, "metric_for_best_model": "loss", "greater_is_better": True},
    "load_best_model_at_end": {**BEST, "load_best_model_at_end": True},
    "push_to_hub": {"push_to_hub": True, "hub_model_id": "memory://compatibility/hub"},
    "dataloader_persistent_workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3},
    "label_names": {"label_names": ["labels"]},
    "accelerator_config": {"accelerator_config": {"split_batches": True}},
    "generation_max_length": {"predict_with_generate": True, "generation_max_length": 7},
    "generation_num_beams": {"predict_with_generate": True, "generation_num_beams": 2},
    "generation_config": {"predict_with_generate": True, "generation_config": {"num_beams": 2}},
    "push_to_hub_organization": {"push_to_hub_model_id": "it", "push_to_hub_organization": "us"},
    "fp16_opt_level": {"fp16": True, "fp16_opt_level": "O0"},
}
#: Arguments that need a launcher's processes; one will do.
LAUNCHED: dict[str, Any] = {
    "fsdp": {"fsdp": "full_shard"},
    "fsdp_config": {"fsdp": "full_shard", "fsdp_config": {"min_num_params": 1}},
    "parallelism": {"parallelism": {"shard": 1}},
    "parallelism_config": {"parallelism_config": {"dp_shard_size": 1}},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "sharded_ddp": {"sharded_ddp": "zero_dp_2"},
    "fsdp_min_num_params": {"fsdp": "full_shard", "fsdp_min_num_params": 100},
    "fsdp_transformer_layer_cls_to_wrap": {"fsdp": "full_shard", "fsdp_transformer_layer_cls_to_wrap": "Linear"},
}
REFUSED: dict[str, Any] = {
    "save_safetensors": False,
    "dispatch_batches": True,
    "tpu_metrics_debug": True,
    "mp_parameters": "{}",
    "jit_mode_eval": True,
    "tpu_num_cores": 8,
    "ray_scope": "all",
}
#: Package or extra that a row names -> the module whose absence is asked for.
MODULES = {"search": "optuna", "liger-kernel": "liger_kernel", "torch-optimi": "optimi", "Kubeflow Trainer": "kubeflow"}
ARGUMENTS = {*field_map(Seq2SeqTrainingArguments), *OLD_NAMES}


class Model(TokenModel):
    """Offers what arguments ask of a model."""

    generation_config = types.SimpleNamespace(pad_token_id=0, eos_token_id=None)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        """Nothing to recompute."""

    def generate(self, input_ids: torch.Tensor, num_beams: int = 1, max_length: int | None = None) -> torch.Tensor:
        return input_ids


def _build(folder: Path, given: dict[str, Any], model: nn.Module | None = None) -> Trainer:
    kinds: Any = (Trainer, TrainingArguments)
    if given.keys() & field_map(Seq2SeqArguments).keys():
        kinds = (Seq2SeqTrainer, Seq2SeqTrainingArguments)
    quiet: dict[str, Any] = {"output_dir": str(folder), "use_cpu": True, "disable_tqdm": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        args = kinds[1](**{**quiet, **given})
        one: Trainer = kinds[0](model or Model(), args, train_dataset=TOKENS, eval_dataset=TOKENS)
        return one


def _name(row: Row) -> str:
    return row.name


def _is_argument(row: Row) -> bool:
    return row.name in ARGUMENTS and row.section in {*compatibility.ARGUMENT_SECTIONS, "Old names"}


def _sample(name: str) -> dict[str, Any]:
    """Arguments that set `name` to something else than its default."""
    if (given := {**WORKS, **LAUNCHED}.get(name)) is not None:
        return dict(given)
    field = field_map(Seq2SeqTrainingArguments)[name]
    default = None if field.default is dataclasses.MISSING else field.default
    if default is None or isinstance(default, bool):
        return {name: not default}
    assert isinstance(default, int | float), f"give {name} a sample value in WORKS"
    return {name: default + 1}


# ------------------------------------------------------------------------------------------------------------ the page
@pytest.mark.parametrize("section", SECTIONS)
def test_every_name_has_exactly_one_row_and_no_row_is_about_something_else(section: str) -> None:
    found = Counter(row.name for row in rows() if row.section == section)
    assert set(found) == SECTIONS[section]
    assert [name for name, count in found.items() if count > 1] == []


def test_the_users_page_has_the_lists_of_the_rows() -> None:
    page = compatibility.PAGE.read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{compatibility.lists()}"), "write it: python -m tests.support.compatibility"


def test_no_section_is_unknown_and_the_designs_public_names_are_all_there() -> None:
    assert {row.section for row in rows()} == set(SECTIONS)
    assert {name for name in vars(Trainer) if not name.startswith("_")} <= {row.name for row in rows()}
    public = {name for name in dir(Trainer) if not name.startswith("_")} - compatibility.INTERNAL
    assert public <= {row.name.removeprefix("trainer.") for row in rows()}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_row_cites_a_test_that_exists_and_says_its_name(section: str) -> None:
    wrong = [f"{row.name}: {row.test}: {what}" for row in rows() if row.section == section and (what := problem(row))]
    assert wrong == []


# ----------------------------------------------------------------------------------------------------- what works works
@pytest.mark.parametrize("row", [row for row in rows() if _is_argument(row) and row.status == "works"], ids=_name)
def test_an_argument_that_works_is_not_refused(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if row.name in LAUNCHED:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    try:
        _build(tmp_path, _sample(row.name))
    finally:
        distributed.shutdown()


def test_what_works_is_there() -> None:
    for row in rows():
        if row.section in ("Public methods", "Private hooks that subclasses override", "Seq2SeqTrainer"):
            assert compatibility.present(row.name) == (row.status != "refused"), row.name
        if row.section in ("Trainer, arguments, results", "Callbacks", "Data collators"):
            assert hasattr(trainer_lib, row.name)


def test_the_attributes_are_there(tmp_path: Path) -> None:
    one = _build(tmp_path, {"push_to_hub": True, "hub_model_id": "memory://compatibility/hub"})
    members: list[tuple[str, Any]] = [("trainer", one)]
    members += [(name, getattr(one, name)) for name in ("accelerator", "args", "state", "control")]
    owners = dict(members)
    for row in rows():
        owner, _, name = row.name.partition(".")
        if name and row.status != "refused" and owner in owners:
            assert hasattr(owners[owner], name), row.name


# -------------------------------------------------------------------------------------------------- what is refused is
@pytest.mark.parametrize("row", [row for row in rows() if _is_argument(row) and row.status == "refused"], ids=_name)
def test_an_argument_that_is_refused_names_the_way_out(row: Row, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _build(tmp_path, {row.name: REFUSED[row.name]})
    assert caught.value.remedy and row.note


def test_no_sample_is_left_over() -> None:
    assert set(REFUSED) == {row.name for row in rows() if _is_argument(row) and row.status == "refused"}
    assert set(WORKS) <= {row.name for row in rows() if _is_argument(row) and row.status == "works"}


def test_what_a_tftrainer_has_is_there() -> None:
    members = {row.name.partition(".")[2]: row.status for row in rows() if row.section == "TFTrainer"}
    parameters = set(inspect.signature(TFTrainer.__init__).parameters)
    assert {name for name in members if hasattr(TFTrainer, name) or name in parameters} == {
        name for name, status in members.items() if status != "refused"
    }
    older = (*compatibility.TF_PROPERTIES, *field_map(TFArguments))
    assert all(hasattr(TFTrainingArguments, name) for name in older)


# ------------------------------------------------------------------------------------------------------- what is needed
def _is_absent(row: Row) -> bool:
    needed = MODULES.get(row.needs or "", (row.needs or "").replace("-", "_"))
    return row.needs is not None and importlib.util.find_spec(needed) is None


@pytest.mark.parametrize("row", [row for row in rows() if row.section == "Optimizers (`optim`)"], ids=_name)
def test_an_optimizer_is_served_needs_its_package_or_is_refused(row: Row) -> None:
    def build() -> torch.optim.Optimizer:
        args = TrainingArguments("out", optim=row.name, optim_target_modules="all-linear")
        return build_optimizer(args, nn.Sequential(nn.Linear(3, 3)))

    if row.status == "works":
        assert isinstance(build(), torch.optim.Optimizer)
    elif row.status == "refused":
        with pytest.raises(ConfigError) as caught:
            build()
        assert caught.value.remedy
    elif _is_absent(row):
        with pytest.raises(MissingExtraError, match=f"pip install .*{row.needs}"):
            build()


@pytest.mark.parametrize("row", [row for row in rows() if row.section == "Trackers (`report_to`)"], ids=_name)
def test_a_tracker_is_served_or_names_its_package(row: Row, tmp_path: Path) -> None:
    if row.status == "works" or not _is_absent(row):
        _build(tmp_path, {"report_to": row.name})
        return
    with pytest.raises(MissingExtraError, match=str(row.needs)) as caught:
        _build(tmp_path, {"report_to": row.name})
    assert caught.value.remedy


@pytest.mark.parametrize("row", [row for row in rows() if _is_argument(row) and row.needs is not None], ids=_name)
def test_an_argument_that_needs_a_package_names_it(row: Row, tmp_path: Path) -> None:
    if not _is_absent(row):
        return
    given: dict[str, Any] = {row.name: "x", "report_to": "trackio"}
    if "liger" in row.name:
        given = {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}}
    if row.name == "fp8":
        given = {"fp8": "rowwise", "bf16": True}
    with pytest.raises(MissingExtraError, match=str(row.needs)) as caught:
        _build(tmp_path, given, llama())
    assert caught.value.remedy


def test_every_callback_of_a_tracker_says_what_the_tracker_says() -> None:
    needs = {row.name: row.needs for row in rows() if row.section == "Trackers (`report_to`)"}
    for name, reporter in REPORTERS.items():
        [row] = [row for row in rows() if row.name == reporter.callback]
        assert row.needs == needs[name]


# ------------------------------------------------------------------------------------------------- the migration's page
def test_the_migrations_example_differs_by_its_import_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    before, after, *_ = (block.splitlines() for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    names = "Trainer, TrainingArguments"
    assert changed == [(f"from transformers import {names}", f"from trainer_lib import {names}")]
    script = tmp_path / "after.py"
    script.write_text("\n".join(after))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    assert 0 < float(capsys.readouterr().out.splitlines()[-1]) < 2
    assert (tmp_path / "out" / "checkpoint-8" / "COMMIT.json").exists()
