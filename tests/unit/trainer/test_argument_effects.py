"""What an argument changes for its user, where no test of a larger subject shows it: loading, launching, reporting."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import logging
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.support.tiny_models import llama
from tests.support.toys import Classifier, classification_rows, token_rows
from tests.support.training import trained, trainer
from trainer_lib import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments, WandbCallback
from trainer_lib.distributed import communicator as distributed
from trainer_lib.errors import ConfigError, InfrastructureError, NonFiniteError

ROWS = classification_rows(12)
LOADING: dict[str, Any] = {
    "dataloader_num_workers": 2,
    "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 3,
    "dataloader_in_order": False,
}
SETTINGS = {"use_reentrant": True, "preserve_rng_state": False}
NO_WARMUP = "warmup_steps = 3 has no effect: the schedule constant has no warm-up"
LOGGED: dict[str, Any] = {"max_steps": 1, "logging_strategy": "steps", "logging_steps": 1}


# ------------------------------------------------------------------------------------------------------------- loading
class Readers(Dataset[Any]):
    """Tells which process read a sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"labels": index, "process": os.getpid()}


@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_num_workers_processes_read(workers: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"per_device_train_batch_size": 1, "remove_unused_columns": False}
    batches = trainer(tmp_path, Readers(), dataloader_num_workers=workers, **given).get_train_dataloader()
    found = {int(batch["process"]) for batch in batches}
    assert len(found) == max(1, workers) and (os.getpid() in found) == (workers == 0)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_arguments_of_loading_are_those_of_torchs_loader(context: str, tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, dataloader_multiprocessing_context=context, **LOADING)
    shown: Any = one.get_train_dataloader()
    for loader in (shown, shown._reader):  # the second one reads
        assert {name: getattr(loader, name.removeprefix("dataloader_")) for name in LOADING} == LOADING
        assert loader.multiprocessing_context.get_start_method() == context
    evaluating: Any = one.get_eval_dataloader(ROWS)
    assert evaluating.in_order and evaluating._reader.in_order, "predictions are matched to samples by position"
    usual: Any = trainer(tmp_path, ROWS, dataloader_num_workers=2).get_train_dataloader()
    assert (usual.persistent_workers, usual.prefetch_factor, usual.in_order) == (False, 2, True)


def test_dataloader_pin_memory_counts_where_there_is_an_accelerator(tmp_path: Path) -> None:
    for device, asked, pinned in (("cpu", True, False), ("cuda", True, True), ("cuda", False, False)):
        one = trainer(tmp_path, ROWS)
        one.args.dataloader_pin_memory = asked  # use_cpu has turned it off
        one._trainflow.world = dataclasses.replace(one._trainflow.world, device=torch.device(device))
        assert one.get_train_dataloader().pin_memory is pinned


# ------------------------------------------------------------------------------------------------ memory and precision
class Recomputing(Classifier):
    """Takes note of how it is told to recompute."""

    told: Any = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        self.told = gradient_checkpointing_kwargs


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"activation_checkpointing": True, "activation_checkpointing_kwargs": SETTINGS}, SETTINGS),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": SETTINGS}, SETTINGS),
        ({"gradient_checkpointing": True}, {"use_reentrant": False}),
        ({}, None),
    ],
)
def test_both_names_of_recomputation_reach_the_model(given: dict[str, Any], told: Any, tmp_path: Path) -> None:
    model = Recomputing()
    trainer(tmp_path, ROWS, model=model, max_steps=1, **given).train()
    assert model.told == told


def test_liger_kernel_config_chooses_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[dict[str, Any]] = []

    def llama_kernels(rope: bool = True, rms_norm: bool = True, model: Any = None) -> None:
        """The signature is what the package offers for this kind of model."""

    kernels: Any = types.ModuleType("liger_kernel.transformers.monkey_patch")
    kernels.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": llama_kernels}
    kernels._apply_liger_kernel_to_instance = lambda model, **config: applied.append(config)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in token_rows(4)]
    given: dict[str, Any] = {"use_liger_kernel": True, "max_steps": 1}
    trainer(tmp_path, rows, model=llama(), liger_kernel_config={"rope": False}, **given).train()
    assert applied == [{"rope": False}]
    with pytest.raises(ConfigError, match=r"liger_kernel_config\.swiglu: .*There are rope, rms_norm"):
        trainer(tmp_path, rows, model=llama(), liger_kernel_config={"swiglu": True}, **given)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """As torchao's configuration."""

    name: str
    emulate: bool = False
    pad_inner_dim: bool = False
    enable_fsdp_float8_all_gather: bool = False

    @classmethod
    def from_recipe_name(cls, name: str) -> Recipe:
        return cls(name)


def recipe(name: str, chosen: Any = None) -> Any:
    """As accelerate's AORecipeKwargs."""
    config = Recipe(name, pad_inner_dim=True, enable_fsdp_float8_all_gather=True)
    return types.SimpleNamespace(config=config, module_filter_func=chosen)


class Scaled(nn.Linear):
    """As a converted layer of torchao: of a class derived from torch's."""


@pytest.mark.parametrize(
    ("fp8", "name"), [(True, "tensorwise"), ("rowwise", "rowwise"), (recipe("rowwise"), "rowwise")]
)
def test_inner_layers_multiply_in_float8(fp8: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []

    def convert(model: nn.Module, *, config: Recipe, module_filter_fn: Any) -> None:
        asked.append(config)
        for path, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and module_filter_fn(layer, path):
                layer.__class__ = Scaled

    torchao: Any = types.ModuleType("torchao.float8")
    torchao.Float8LinearConfig = Recipe
    torchao.convert_to_float8_training = convert
    monkeypatch.setitem(sys.modules, torchao.__name__, torchao)
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in token_rows(4)]
    one = trainer(tmp_path, rows, model=llama(), max_steps=1, fp8=fp8, bf16=True)
    assert one.args.fp8 == name
    assert any(isinstance(layer, Scaled) for layer in one.model.modules()), "before a strategy shards them"
    one.train()
    assert asked == [Recipe(name, emulate=not torch.cuda.is_available(), pad_inner_dim=True)]
    chosen = {path: layer for path, layer in one.model.named_modules() if isinstance(layer, Scaled)}
    assert len(chosen) > 4 and not {"lm_head", "model.layers.0.self_attn.q_proj"} & chosen.keys()
    assert all(size % 16 == 0 for layer in chosen.values() for size in layer.weight.shape)
    one.train()
    assert [*chosen] == [path for path, layer in one.model.named_modules() if isinstance(layer, Scaled)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fp8": "rowise", "bf16": True}, "fp8 = rowise: .*tensorwise or rowwise"),
        ({"fp8": recipe("blockwise"), "bf16": True}, "fp8 = .*blockwise.*tensorwise or rowwise"),
        ({"fp8": recipe("rowwise", bool), "bf16": True}, "fp8 = .*Remove module_filter_func"),
        ({"fp8": object(), "bf16": True}, "fp8 = .*tensorwise or rowwise"),
        ({"fp8": True}, "fp8 = tensorwise: .*Give bf16=True too"),
        ({"fp8": True, "bf16": True}, "fp8 = tensorwise: The model has no linear layer for it"),
    ],
)
def test_float8_that_would_have_no_place_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, ROWS, **given)


@pytest.mark.parametrize(
    ("given", "words", "times"),
    [
        ({"liger_kernel_config": {"rope": False}}, "liger_kernel_config = {'rope': False} has no effect without", 1),
        ({"optim_target_modules": "all-linear"}, "optim_target_modules = all-linear has no effect without an", 1),
        ({"optim_target_modules": ["head"]}, "optim_target_modules = ['head'] has no effect without", 1),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, NO_WARMUP, 1),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}, NO_WARMUP, 0),
        # warms up by itself
        ({"lr_scheduler_type": "constant", "warmup_steps": 3, "optim": "schedule_free_sgd"}, NO_WARMUP, 0),
    ],
)
def test_an_argument_without_an_effect_beside_the_others_is_said_once(
    given: dict[str, Any], words: str, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, ROWS, **given)
    assert caplog.text.count(words) == times


def test_use_cpu_turns_pinned_memory_off_until_it_is_taken_back() -> None:
    args = TrainingArguments("out", use_cpu=True, dataloader_pin_memory=True)
    assert args.dataloader_pin_memory is False
    args.use_cpu = False
    args.validate()
    assert args.dataloader_pin_memory is True


# ------------------------------------------------------------------------------------------------------------- logging
@pytest.mark.parametrize(("given", "level"), [("error", logging.ERROR), ("debug", logging.DEBUG), ("passive", 35)])
def test_the_level_of_the_log_is_that_of_transformers_too(given: str, level: int, tmp_path: Path) -> None:
    theirs = logging.getLogger("transformers")
    before = theirs.level
    try:
        theirs.setLevel(35)
        trainer(tmp_path, ROWS, log_level=given)
        assert theirs.level == level
    finally:
        theirs.setLevel(before)
        logging.getLogger("trainer_lib").setLevel(logging.NOTSET)


# ----------------------------------------------------------------------------------------------------------- launching
def test_ddp_timeout_seconds_are_waited_for_the_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with_port = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    for name, value in {**with_port, **interfaces}.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    with pytest.raises(InfrastructureError, match="The 2 processes did not find each other"):
        distributed.init(TrainingArguments("out", use_cpu=True, ddp_timeout=1))
    assert time.monotonic() - started < 30  # torch's own is 30 minutes


def test_ddp_backend_must_serve_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^ddp_backend = nccl: This backend cannot serve CPU tensors"):
        trainer(tmp_path, ROWS, ddp_backend="nccl")


def test_one_process_uses_one_gpu_and_names_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "1"])
    for device, world in (("cpu", 1), ("cuda", 4)):
        distributed.mention_idle_gpus(torch.device(device), world)
    assert not caplog.records
    distributed.mention_idle_gpus(torch.device("cuda"), 1)
    assert "One of 4 GPUs is used. For all: torchrun --nproc-per-node 4 train.py" in caplog.text


def test_local_rank_of_an_old_launcher_counts_without_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    second = TrainingArguments("out", local_rank=1)
    assert (second.local_process_index, second.should_log, second.should_save) == (1, False, True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert (second.local_process_index, second.should_log) == (0, True)


# ----------------------------------------------------------------------------------------------------------- reporting


@pytest.mark.parametrize(("disabled", "expected"), [(True, "{'loss':"), (False, "step 1/1")])
def test_disable_tqdm_prints_dictionaries_instead_of_progress(
    disabled: bool, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, ROWS, disable_tqdm=disabled, **LOGGED).train()
    shown = "".join(capsys.readouterr())
    assert expected in shown
    assert ("{'loss':" in shown) == disabled


def installed(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A package that looks installed; none of the trackers' own packages is, here."""
    package = types.ModuleType(name)
    package.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, package)
    return package


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], list[Any]]:
    """A stand-in for the package: what its runs were asked for, and what was logged."""
    asked: list[dict[str, Any]] = []
    logged: list[Any] = []
    package = installed(monkeypatch, "wandb")

    def init(**given: Any) -> Any:
        asked.append(given)
        package.run = types.SimpleNamespace(summary={}, _label=lambda **_: None)

    package.run, package.log, package.init = None, logged.append, init
    package.config = type("Config", (dict,), {"update": lambda *_, **__: None})()
    errors = installed(monkeypatch, "wandb.sdk.lib.config_util")
    errors.ConfigError = type("ConfigError", (Exception,), {})
    return asked, logged


def test_the_run_name_is_what_wandb_is_told_and_a_project_in_vain_is_named(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, logged = wandb
    monkeypatch.setenv("WANDB_RUN_ID", "an earlier one")
    one = trainer(tmp_path / "out", ROWS, report_to="wandb", project="birds", run_name="first", **LOGGED)
    assert type(one.callback_handler.callbacks[1]).__bases__ == (WandbCallback,)
    assert os.environ.pop("WANDB_RESUME") == "allow"  # the run that WANDB_RUN_ID names keeps what it has
    assert "project = birds has no effect without" in caplog.text and "WANDB_PROJECT" in caplog.text
    monkeypatch.setenv("WANDB_PROJECT", "birds")
    one.train()
    assert asked == [{"project": "birds", "name": "first"}]
    assert any("train/loss" in values for values in logged)


def test_overrides_of_a_wandb_subclass_take_effect(wandb: Any, tmp_path: Path) -> None:
    """As wandb's own guide writes a callback: a run opened in `setup`, further values logged by the module."""
    _, logged = wandb
    base: Any = WandbCallback  # transformers has no types

    class Samples(base):  # type: ignore[misc]
        def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
            super().setup(args, state, model, **kwargs)
            self._wandb.log({"table": "Classifier"})

        def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **more: Any) -> None:
            super().on_log(args, state, control, model, {**logs, "more": 1.0}, **more)

    trainer(tmp_path, ROWS, callbacks=[Samples()], **LOGGED).train()
    assert {"table": "Classifier"} in logged
    assert all("train/more" in values for values in logged if "train/loss" in values)


def test_the_trackio_arguments_reach_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    class Trackio(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.update({name: value for name, value in args.to_dict().items() if name.startswith("trackio_")})

    installed(monkeypatch, "trackio")
    module = importlib.import_module("transformers.integrations.integration_utils")
    monkeypatch.setattr(module, "TrackioCallback", Trackio)
    names = ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
    given: dict[str, Any] = {name: f"me/{name}" for name in names}
    trainer(tmp_path, ROWS, report_to="trackio", **given, **LOGGED).train()
    assert told == given


def test_arguments_that_ask_for_nothing_more_are_served(tmp_path: Path) -> None:
    written_in_full = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False}
    assert trainer(tmp_path, ROWS, fsdp_config=written_in_full, max_steps=1).train().global_step == 1
    args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", disable_tqdm=True)
    assert Seq2SeqTrainer(Classifier(), args, train_dataset=ROWS).train().global_step == 1


class Overflowing(Classifier):
    """Its second layer makes an infinity out of what the first one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.data.fill_(3e38)
        self.head.bias.data.fill_(3e38)


def test_the_first_value_that_is_not_finite_and_what_ran_before_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = trainer(tmp_path, ROWS, model=Overflowing(), debug="underflow_overflow", max_steps=2)
    said = r"debug = underflow_overflow: .* in the output of head \(Linear\)"
    with pytest.raises(NonFiniteError, match=said) as found:
        one.train()
    assert one.state.global_step == 0
    assert found.value.remedy is not None and found.value.details is not None
    frames = [line for line in found.value.details.splitlines() if line.endswith(")") and not line.startswith(" ")]
    assert frames == ["body (Linear)", "norm (LayerNorm)", "dropout (Dropout)", "head (Linear)"]
    assert "  weights   3.00e+38  3.00e+38  (3, 8)" in found.value.details
    assert "head (Linear) is not finite" in caplog.text


def test_bad_inputs_and_weights_are_told_apart_and_a_sound_model_trains_as_without(tmp_path: Path) -> None:
    def ended(folder: str, rows: Any = ROWS, **given: Any) -> Any:
        return trained(tmp_path / folder, rows, max_steps=3, **given).model

    with pytest.raises(NonFiniteError, match=r"in the input of body \(Linear\)"):
        ended("a", [{**row, "x": torch.full((6,), torch.nan)} for row in ROWS], debug="underflow_overflow")
    broken = Classifier()
    broken.norm.weight.data[0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"in the weights of norm \(LayerNorm\)"):
        ended("b", model=broken, debug=["underflow_overflow"])
    watched, plain = ended("c", debug="underflow_overflow"), ended("d")
    assert all(torch.equal(value, watched.state_dict()[name]) for name, value in plain.state_dict().items())
    assert not any(module._forward_hooks for module in watched.modules())


# ---------------------------------------------------------------------------------------------------------- past_index
class Recurrent(nn.Module):
    """Adds what it remembers of the batch before; the memory is its third output."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.as_tuple = as_tuple
        self.given: list[float | None] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, mems: torch.Tensor | None = None) -> Any:
        assert mems is None or not mems.requires_grad
        self.given.append(None if mems is None else float(mems))
        logits = self.layer(x) + (0 if mems is None else mems)
        memory = logits.mean() * 0 + len(self.given)
        if labels is None:
            return {"logits": logits, "memory": memory}
        loss = nn.functional.cross_entropy(logits, labels)
        return (loss, logits, memory) if self.as_tuple else {"loss": loss, "logits": logits, "memory": memory}


@pytest.mark.parametrize("as_tuple", [True, False])
def test_the_memory_is_fed_back_and_reset_each_epoch_and_around_evaluation(as_tuple: bool, tmp_path: Path) -> None:
    model = Recurrent(as_tuple)
    given: dict[str, Any] = {"eval_dataset": ROWS[:8], "eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 2}
    trainer(tmp_path, ROWS, model=model, past_index=2, per_device_eval_batch_size=4, **given).train()
    steps = [None, 1.0], [None, 3.0], [None], [None], [None, 7.0], [None, 9.0], [None, 11.0]
    # Steps 1, 2 | evaluation | step 3 (epoch ends) | step 4 | evaluation | steps 5, 6 | evaluation
    assert model.given == [each for part in steps for each in part]
    model = Recurrent(as_tuple=False)
    one = trainer(tmp_path, None, model=model, past_index=2, per_device_eval_batch_size=4)
    one.predict([{"x": row["x"]} for row in ROWS])  # a memory without labels too
    assert model.given == [None, 1.0, 2.0]


def test_a_position_that_the_outputs_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="past_index = 5: The model returns 3 values"):
        trainer(tmp_path, ROWS, model=Recurrent(as_tuple=True), past_index=5, max_steps=1).train()
