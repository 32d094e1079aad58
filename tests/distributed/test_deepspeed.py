"""DeepSpeed ZeRO trains like one process, divides what its stage says, and stops and goes on anywhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.distributed.test_ddp import ROWS, TOKENS, train_on_poisoned_rank, train_on_tokens
from tests.distributed.test_layouts import check_answers
from tests.support.distributed import loaded, run_distributed
from tests.support.repository import ROOT
from tests.support.toys import Classifier
from tests.support.training import LOGGED, assert_equal, logged, losses, trainer
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs import deepspeed_config as keys
from trainer_lib.arguments.configs.deepspeed_config import adopt
from trainer_lib.checkpoint.optimizer import snapshot_optimizer
from trainer_lib.errors import ConfigError, InfrastructureError
from trainer_lib.strategies.deepspeed import zero_state
from trainflow.flows.spec.spec import load_spec

pytestmark = pytest.mark.needs("deepspeed")


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    # Every engine of DeepSpeed's imports its optimizers, and they torch's compiler: seconds.
    with loaded("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "transformers.models.gpt2.modeling_gpt2"):
        yield


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    """A configuration whose buffers fit a toy, and that divides every parameter in stage 3."""
    sizes = {"reduce_bucket_size": 2000, "allgather_bucket_size": 2000}
    if stage == 3:
        sizes |= {"stage3_prefetch_bucket_size": 100, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": {"stage": stage, **sizes, **settings}}


CPU = {"device": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "stage 1": {"deepspeed": zero(1)},
    "stage 2": {"deepspeed": zero(2)},
    "stage 3": {"deepspeed": zero(3)},
    "stage 1, offloaded": {"deepspeed": zero(1, cpu_offload=True)},
    "stage 2, offloaded": {"deepspeed": zero(2, offload_optimizer=CPU)},
    "stage 3, offloaded": {"deepspeed": zero(3, offload_optimizer=CPU, offload_param=CPU)},
}
#: Every stage, in fp32 and bf16, offloaded or not.
RESUMED: dict[str, dict[str, Any]] = {
    **{way: WAYS[way] for way in ("stage 1", "stage 2, offloaded", "stage 3", "stage 3, offloaded")},
    **{f"stage {stage}, bf16": {"deepspeed": zero(stage), "bf16": True} for stage in (1, 2, 3)},
}


# ----------------------------------------------------------------------------------------------------- like one process
def held_bytes(strategy: Any, model: torch.nn.Module) -> dict[str, int]:
    """The bytes that this process holds: parameters (between steps), and masters with optimizer state."""

    def size(tensors: Iterable[Any]) -> int:
        return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor))

    # In stage 3 the parameter itself is empty, and `ds_tensor` is this rank's share.
    parameters = size(getattr(each, "ds_tensor", each) for each in model.parameters())
    partitions = strategy._partitions
    state = partitions.zero.optimizer.state
    optimizer = sum(size([flat, *(state.get(flat) or {}).values()]) for flat in partitions.flats())
    return {"parameters": parameters, "optimizer": optimizer}


def tokens(folder: str, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    training = train_on_tokens(folder, **settings)
    training.save_model(f"{folder}/exported")
    strategy: Any = training._trainflow.engine.strategy
    held = held_bytes(strategy, training.model) if settings else None
    kind = strategy.describe()["strategy"], type(training.model_wrapped).__name__
    return {"logs": logged(training), "held": held, "kind": kind}


def like_one_process(folder: str) -> dict[str, Any]:
    return {name: tokens(f"{folder}/{name}", **settings) for name, settings in WAYS.items()}


def test_two_processes_train_like_one_and_each_holds_its_part(tmp_path: Path) -> None:
    """Unequal token counts per rank, a ragged last batch, accumulation, clipping: losses to 1e-6.

    187 parameters of 4 bytes; masters and Adam's two moments are 3 times that.
    """
    alone = tokens(str(tmp_path / "alone"))
    ranks = run_distributed(like_one_process, 2, str(tmp_path), timeout_s=150)
    expected = load_file(tmp_path / "alone" / "exported" / "model.safetensors")
    for way in WAYS:
        for end in (rank[way] for rank in ranks):
            assert end["kind"] == ("deepspeed", "DeepSpeedEngine")
            for mine, theirs in zip(alone["logs"], end["logs"], strict=True):
                assert mine.keys() == theirs.keys()
                for name in mine.keys() - {"total_flos"}:  # padding is work: a micro-batch is as wide as its rows
                    assert mine[name] == pytest.approx(theirs[name], rel=1e-6), (way, name)
            if "offloaded" not in way:  # in stage 3 half, rounded up tensor by tensor
                assert end["held"]["parameters"] == (376 if way == "stage 3" else 748), way
            assert 3 * 748 / 2 <= end["held"]["optimizer"] <= 3 * 748 / 2 + 32, way
        exported = load_file(tmp_path / way / "exported" / "model.safetensors")
        assert exported.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(exported[name], value, rtol=2e-5, atol=1e-7, err_msg=f"{way} {name}")


# ------------------------------------------------------------------------------------------------------ stop and resume
class Awkward(nn.Module):
    """Decaying and other parameters, a frozen one, an unused one, tied ones, dropout, and buffers."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 9)
        self.frozen = nn.Linear(9, 9)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(9)
        self.first = nn.Linear(9, 9, bias=False)
        self.second = nn.Linear(9, 9, bias=False)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(5, 3)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(9, 3)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += int(x.sum() * 1000)  # another number on every process
        hidden = self.norm(torch.relu(self.frozen(self.inside(x))))
        logits = self.head(self.dropout(self.second(torch.relu(self.first(hidden)))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class StopAfter(TrainerCallback):
    """Saves and ends training after a step, as a user does who continues on another machine."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def state_of(training: Trainer) -> dict[str, Any]:
    """Everything that two equal runs share; tensors are whole on rank 0 and absent elsewhere. Collective."""
    assert training.optimizer is not None
    strategy, model = training._trainflow.engine.strategy, training.model_wrapped
    optimizer = snapshot_optimizer(training.optimizer, strategy.named_parameters(model))
    tensors = {f"model/{name}": value for name, value in strategy.gathered(strategy.local_state(model)).items()}
    tensors |= {f"optimizer/{name}": value for name, value in strategy.gathered(optimizer.tensors).items()}
    return {
        "tensors": {name: value.clone() for name, value in tensors.items() if not value.is_meta},
        "groups": [{key: value for key, value in group.items() if key != "fused"} for group in optimizer.groups],
        "schedule": {key: value for key, value in training.lr_scheduler.state_dict().items() if key != "lr_lambdas"},
        "random": torch.get_rng_state().tolist(),
        "logs": logged(training),
        "position": (training.state.global_step, training.state.epoch),
    }


def awkward(folder: str, *, stop: int | None = None, resume: bool = False, **settings: Any) -> dict[str, Any]:
    """Train `Awkward`, perhaps only up to a step, perhaps from there; losses, weights and state after it."""
    torch.manual_seed(0)
    model = Awkward(settings.pop("dropout", 0.1))
    common: dict[str, Any] = {"num_train_epochs": 2, "global_batch_size": 6, "per_device_train_batch_size": 2}
    common |= {"weight_decay": 0.1, "max_grad_norm": 0.3, **LOGGED}
    training = trainer(folder, ROWS, model=model, callbacks=[StopAfter(stop)], **{**common, **settings})
    training.train("auto" if resume else None)
    return state_of(training)


def stops_and_goes_on(folder: str) -> dict[str, Any]:
    ends: dict[str, Any] = {}
    for name, settings in RESUMED.items():
        whole = awkward(f"{folder}/{name}/whole", **settings)
        awkward(f"{folder}/{name}/cut", stop=3, **settings)
        ends[name] = whole, awkward(f"{folder}/{name}/cut", resume=True, **settings)
    return ends


def test_resuming_is_exact(tmp_path: Path) -> None:
    """Two groups, frozen, unused and tied parameters, buffers; dropout; in fp32 and bf16, offloaded or not."""
    ranks = run_distributed(stops_and_goes_on, 2, str(tmp_path), timeout_s=150)
    for rank in ranks:
        for name, (whole, resumed) in rank.items():
            try:
                assert_equal(whole, resumed)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
    kept = ranks[0]["stage 3"][0]["tensors"]
    assert {"model/frozen.weight", "model/seen", "optimizer/first.weight/exp_avg"} <= kept.keys()
    whole = [name for name, value in ranks[1]["stage 3"][0]["tensors"].items() if value.ndim]
    assert not whole, "a rank that writes nothing holds nothing whole"
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"model.safetensors", "optimizer.safetensors"} <= written
    others = [name for name in written if not name.endswith((".json", ".safetensors"))]
    assert not others, "nothing else, nothing pickled"


MOVES = {
    "stage 2 to replicas": ("stage 2", "replicas"),
    "replicas to stage 3": ("replicas", "stage 3"),
    "stage 1 to stage 3, offloaded": ("stage 1", "stage 3, offloaded"),
    "stage 3 to one process": ("stage 3", None),
    "stage 2 to one process": ("stage 2", None),
    "one process to stage 3": (None, "stage 3"),
    "fsdp to stage 3": ("fsdp", "stage 3"),
    "stage 3 to fsdp": ("stage 3", "fsdp"),
}


def moves(folder: str) -> dict[str, Any]:
    """Stop at step 3 in one way, go on in another; what one process begins or ends is left to `alone`."""
    ways = {**WAYS, "replicas": {}, "fsdp": {"fsdp": "full_shard"}}
    ends: dict[str, Any] = {}
    for name, (first, then) in MOVES.items():
        if first:
            awkward(f"{folder}/{name}", stop=3, dropout=0.0, **ways[first])
        if then:
            ends[name] = awkward(f"{folder}/{name}", resume=True, dropout=0.0, **ways[then])
    return ends


def alone(folder: str) -> dict[str, Any]:
    """One process: stage 3 divides among one."""
    settings = {"dropout": 0.0, **WAYS["stage 3"]}
    return {
        "never stopped": awkward(f"{folder}/alone", **settings),
        "stage 3 to one process": awkward(f"{folder}/stage 3 to one process", resume=True, **settings),
    }


def test_it_goes_on_in_another_way(tmp_path: Path) -> None:
    """Other stages, replicas, another number of processes: the same samples, losses and state as if never stopped."""
    folder = str(tmp_path)
    whole = awkward(f"{folder}/whole", dropout=0.0)
    awkward(f"{folder}/one process to stage 3", stop=3, dropout=0.0)
    ends = run_distributed(moves, 2, folder, timeout_s=150)[0]
    ends |= run_distributed(alone, 1, folder)[0]
    ends["stage 2 to one process"] = awkward(f"{folder}/stage 2 to one process", resume=True, dropout=0.0)
    assert ends.keys() == {*MOVES, "never stopped"}
    for name, end in ends.items():
        assert end["position"] == whole["position"], name
        for mine, theirs in zip(whole["logs"], end["logs"], strict=True):
            assert mine.get("loss", 0.0) == pytest.approx(theirs.get("loss", 0.0), rel=1e-6), name
            for key in mine.keys() - {"total_flos"}:  # dummy batches are work, too
                assert mine[key] == pytest.approx(theirs[key], rel=2e-5, abs=1e-7), (name, key)
        for key, value in whole["tensors"].items():
            # Torch's optimizers leave alone what no loss uses; under ZeRO it decays, with a gradient of zero. The
            # buffer is of what the first process saw.
            if "/unused" not in key and key != "model/seen" and not key.endswith("/step"):
                np.testing.assert_allclose(end["tensors"][key], value, rtol=1e-4, atol=3e-6, err_msg=f"{name}: {key}")


# --------------------------------------------------------------------------- steps that are not finite, unequal batches
def measured(folder: str, **settings: Any) -> dict[str, Any]:
    """Evaluated before any training, during it, and at its end with the best weights; 7 rows in batches of 2, so that
    one process has a batch more than the other."""
    torch.manual_seed(0)
    steps: dict[str, Any] = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    steps |= {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    training = trainer(
        folder,
        ROWS,
        model=Classifier(dropout=0.0),
        eval_dataset=ROWS[:7],
        compute_metrics=lambda p: {"rows": float(len(p.predictions))},
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        **steps,
        **settings,
    )
    before = training.evaluate()
    training.train()
    results = [before, training.evaluate(), training.evaluate(ROWS[:1])]
    predicted = training.predict(ROWS[:5]).predictions
    values = [result[f"eval_{name}"] for result in results for name in ("loss", "rows")]
    return {
        "measured": [*values, training.state.best_metric],
        "predicted": None if predicted is None else np.array(predicted),
    }


def poisoned_and_measured(folder: str) -> dict[str, Any]:
    ends: dict[str, Any] = {"replicas": measured(f"{folder}/replicas")}
    for stage in (1, 2, 3):
        for half in (False, True):
            where = f"{folder}/poisoned/{stage}{half}"
            assert train_on_poisoned_rank(where, deepspeed=zero(stage), bf16=half) == "3 2"
        ends[f"stage {stage}"] = measured(f"{folder}/{stage}", deepspeed=zero(stage))
    return ends


def test_a_nan_on_one_rank_is_skipped_by_all_and_no_rank_waits_for_one_without_a_batch(tmp_path: Path) -> None:
    """In fp32 and bf16; the best weights are loaded at the end."""
    for rank in run_distributed(poisoned_and_measured, 2, str(tmp_path), timeout_s=150):
        theirs = rank.pop("replicas")
        for name, ours in rank.items():
            assert ours["measured"] == pytest.approx(theirs["measured"], rel=1e-5), name
            assert (ours["predicted"] is None) == (theirs["predicted"] is None)
            if ours["predicted"] is not None:
                np.testing.assert_allclose(ours["predicted"], theirs["predicted"], rtol=1e-4, atol=1e-6)


# -------------------------------------------------------------------------------- schedules, exchanges, members, models
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.02},
    "WarmupDecayLR": {
        "warmup_num_steps": 2,
        "warmup_type": "linear",
        "total_num_steps": "auto",
        "warmup_max_lr": "auto",
    },
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.03, "cycle_first_step_size": 2, "cycle_momentum": False},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
}


def rates(folder: str) -> dict[str, list[float]]:
    """The learning rates of each schedule of DeepSpeed's, stopped and resumed on the way."""
    ends = {}
    steps: dict[str, Any] = {"max_steps": 6, "save_steps": 100, "learning_rate": 5e-5, **LOGGED}
    optimizer = {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}
    for kind, params in SCHEDULES.items():
        config = {**zero(2), "scheduler": {"type": kind, "params": params}, "optimizer": optimizer}
        stopped = trainer(f"{folder}/{kind}", ROWS, deepspeed=config, callbacks=[StopAfter(3)], **steps)
        assert stopped.args.learning_rate == 0.02
        stopped.train()
        resumed = trainer(f"{folder}/{kind}", ROWS, deepspeed=config, **steps)
        resumed.train("auto")
        assert type(resumed.lr_scheduler).__name__ == kind
        ends[kind] = [entry["learning_rate"] for entry in resumed.state.log_history if "learning_rate" in entry]
    return ends


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks find in one group: forming it takes longer than any of these trainings."""
    return run_distributed(in_one_group, 2, str(tmp_path_factory.mktemp("together")), timeout_s=150)


def in_one_group(folder: str) -> dict[str, Any]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    built(f"{folder}/built")
    found = {
        "members": members(f"{folder}/members"),
        "rates": rates(f"{folder}/rates"),
        "exchanges": exchanges(f"{folder}/exchanges"),
        "keys": {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()},
    }
    refused(f"{folder}/refused")
    return found


def test_schedules_of_deepspeeds_go_on_where_they_stopped(together: list[dict[str, Any]]) -> None:
    ends = together[0]["rates"]
    assert ends["WarmupLR"] == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.015, 0.02], abs=1e-9)
    assert ends["WarmupDecayLR"] == pytest.approx([0.0, 0.0, 0.01, 0.02, 0.015, 0.01], abs=1e-9)
    assert len(ends["OneCycle"]) == len(ends["LRRangeTest"]) == 6
    assert max(ends["OneCycle"]) == pytest.approx(0.03)
    assert ends["LRRangeTest"][-1] > ends["LRRangeTest"][0]


def exchanges(folder: str) -> list[int]:
    """How often gradients are exchanged in a step of 3 micro-steps, in stages 1 and 2."""
    counts = []
    steps: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    for stage in (1, 2):
        training = trainer(f"{folder}/{stage}", ROWS, deepspeed=zero(stage), **steps)
        strategy: Any = training._trainflow.engine.strategy
        calls: list[int] = []

        def counted(model: Any, optimizer: Any, settle: Any = strategy.resolve, calls: list[int] = calls) -> Any:
            engine, wrapped = settle(model, optimizer)
            reduce = engine.optimizer.reduce_ipg_grads

            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return reduce(*args, **kwargs)

            engine.optimizer.reduce_ipg_grads = call
            return engine, wrapped

        strategy.resolve = counted
        training.train()
        counts.append(len(calls))
    return counts


def test_stage_one_exchanges_nothing_inside_of_a_step(together: list[dict[str, Any]]) -> None:
    """Stage 2 has to: no process keeps whole gradients."""
    assert [rank["exchanges"] for rank in together] == [[1, 3]] * 2


def built(folder: str) -> None:
    """A model that model_init builds is divided from the start; one of transformers' is loaded into its parts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 11, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    path, whole = Path(folder) / "pretrained", 0
    if os.environ["RANK"] == "0":
        torch.manual_seed(3)
        GPT2LMHeadModel(config).save_pretrained(path)
    for name in ("plain", "transformers"):  # forming the group, the first one waits for what rank 0 saves
        make: Any = Classifier if name == "plain" else lambda: GPT2LMHeadModel.from_pretrained(path)
        rows = ROWS if name == "plain" else [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in TOKENS]
        training = trainer(f"{folder}/{name}", rows, model_init=make, deepspeed=zero(3), max_steps=2, **LOGGED)
        strategy: Any = training._trainflow.engine.strategy
        whole = sum(strategy.numel(value) for value in training.model.parameters())
        assert whole == training.get_num_trainable_parameters() > 0
        assert not any(value.numel() for value in training.model.parameters()), "between layers' turns nothing is whole"
        training.train()
        training.save_model(f"{folder}/{name}/exported")
        plain = trainer(f"{folder}/{name}-replicas", rows, model_init=make, max_steps=2, **LOGGED)
        plain.train()
        assert losses(training) == pytest.approx(losses(plain), rel=1e-5)
    if os.environ["RANK"] == "0":
        again = GPT2LMHeadModel.from_pretrained(f"{folder}/transformers/exported")
        assert sum(value.numel() for value in again.parameters()) == whole


class ScaledLoss(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs["logits"] * self.scale, labels)


class Whole(torch.optim.SGD):
    """A user's optimizer."""


def refused(folder: str) -> None:
    """What only shows once there is a model or an optimizer."""

    def refuse(*words: str, config: dict[str, Any] | None = None, **settings: Any) -> None:
        with pytest.raises((ConfigError, InfrastructureError)) as caught:
            trainer(folder, ROWS, max_steps=1, deepspeed={**zero(2), **(config or {})}, **settings).train()
        assert all(word in str(caught.value) for word in words), str(caught.value)

    refuse("bf16=True", model=Classifier().bfloat16())
    refuse("zero_allow_untested_optimizer: true", optimizer_cls_and_kwargs=(Whole, {"lr": 0.1}))
    holds = "optimizer = AdamW: It holds trained parameters that are not the model's"
    refuse(holds, compute_loss_func=ScaledLoss())
    tested = "not one of the optimizers that DeepSpeed tests"
    refuse(tested, config={"zero_allow_untested_optimizer": False}, optim="sgd")
    refuse("cycle_min", config={"scheduler": {"type": "OneCycle", "params": {"cycle_min": 1}}})
    lacking = (*zero_state._STAGES_1_2, "what_it_has_not")
    pytest.MonkeyPatch().setattr(zero_state, "_STAGES_1_2", lacking)  # this process ends with it
    refuse("it lacks what_it_has_not", "deepspeed==0.19.8")


def members(folder: str) -> dict[str, Any]:
    training: Any = trainer(folder, ROWS, deepspeed={**zero(2), "gradient_clipping": 0.5}, max_steps=1)
    helper = training.accelerator
    assert training.deepspeed is None
    with pytest.raises(ConfigError, match="when training begins"):
        helper.prepare(training.model)
    training.train()
    assert helper.prepare(training.model) is training.deepspeed is training.model_wrapped
    assert helper.unwrap_model(training.model_wrapped) is training.model
    assert training.args.max_grad_norm == 0.5, "the file says it, and the arguments are the one truth"
    parameters = sum(len(group) for group in training.get_optimizer_group())
    assert parameters == len(list(training.model.parameters())), "groups show the model's, not what they were cut into"
    assert training.get_optimizer_group("head.bias")["weight_decay"] == 0.0
    plugin = helper.state.deepspeed_plugin
    return {
        "deepspeed": training.deepspeed is training.model_wrapped,
        "is_deepspeed_enabled": (training.is_deepspeed_enabled, training.is_fsdp_enabled),
        "place_model_on_device": training.place_model_on_device,
        "deepspeed_plugin": (plugin.zero_stage, plugin.zero3_init_flag, plugin.deepspeed_config["gradient_clipping"]),
    }


def test_members_tell_what_trains(together: list[dict[str, Any]]) -> None:
    """The ranks assert the rest, that a model is divided while it is built, and what is refused by name."""
    for rank in together:
        assert rank["members"] == {
            "deepspeed": True,
            "is_deepspeed_enabled": (True, False),
            "place_model_on_device": False,
            "deepspeed_plugin": (2, False, 0.5),
        }


def plainly(folder: str) -> tuple[list[float], str]:
    """In a process that no launcher started: the losses without DeepSpeed and in stages 0, 2 and 3; what is logged."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    Path(folder).mkdir(exist_ok=True)
    logging.basicConfig(level=logging.WARNING, filename=f"{folder}/log", force=True)

    def train(name: str, **settings: Any) -> Trainer:
        training = trainer(f"{folder}/{name}", ROWS[:16], max_steps=2, optim="adamw_torch_fused", **LOGGED, **settings)
        training.train()
        return training

    configs = ({"zero_optimization": {"stage": stage}} for stage in (2, 3))
    trainings = [
        train("alone"),
        train("0", deepspeed={"gradient_clipping": 1.0, "steps_per_print": 9}),
        *(train(f"zero-{number}", deepspeed=config) for number, config in enumerate(configs)),
    ]
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 2}
    scheduled = train("schedule", deepspeed={"scheduler": {"type": "WarmupLR", "params": warmup}})
    assert type(scheduled.lr_scheduler).__module__ == "deepspeed.runtime.lr_schedules"
    return [sum(losses(training)) for training in trainings], Path(folder, "log").read_text()


def test_plain_python_trains_with_every_stage_and_stage_0_is_training_without_it(tmp_path: Path) -> None:
    [(sums, said)] = run_distributed(plainly, 1, str(tmp_path))
    assert sums == pytest.approx([sums[0]] * 4, rel=1e-6)
    assert "these parts have no effect: steps_per_print." in said


# ----------------------------------------------------------------------------------------- in interpreters of their own
def test_answers_end_at_other_tokens_on_other_ranks(tmp_path: Path) -> None:
    check_answers(tmp_path, "zero")


def test_the_examples_spec_asks_for_stage_two() -> None:
    """Run by hand: accuracy 0.98 on the test split after 5 epochs on two processes of the CPU."""
    args = TrainingArguments.from_dict(load_spec(ROOT / "examples" / "digits" / "zero.yaml").train.args)
    adopted = adopt(args)
    assert (adopted.stage, args.max_grad_norm, adopted.zero["reduce_bucket_size"]) == (2, 1.0, 1e6)


def test_every_key_of_the_installed_version_is_decided_on(together: list[dict[str, Any]]) -> None:
    """A key that DeepSpeed gains has to be mapped, passed or refused here."""
    decided = {*keys.ZERO_MAPPED, *keys.OFFLOADS, *keys.ZERO_AUTO, *keys.ZERO_ALWAYS_ON, *keys.ZERO_PASSED}
    assert together[0]["keys"] - decided - set(keys.ZERO_REFUSED) == set()
