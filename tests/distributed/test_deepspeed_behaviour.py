"""How ZeRO behaves in the Trainer's hands: steps that are not finite, evaluations, schedules, models that are built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.spec.spec import load_spec
from tests.support.distributed import run_distributed
from tests.support.rank_runs import train_on_poisoned_rank
from tests.support.repository import ROOT
from tests.support.toys import Classifier, classification_rows, token_rows
from tests.support.training import trainer
from tests.support.zero import StopAfter, zero
from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.deepspeed.deepspeed_config import adopt
from trainer_lib.errors import ConfigError, InfrastructureError
from trainer_lib.strategies.deepspeed import zero_partitions

pytestmark = pytest.mark.needs("deepspeed")
TOKENS = token_rows(23)
ROWS = classification_rows(23)


def measured(folder: str, **given: Any) -> dict[str, Any]:
    """Evaluated before any training, during it, and at its end with the best weights; 7 rows in batches of 2, so that
    one process has a batch more than the other."""
    torch.manual_seed(0)
    one = trainer(
        folder,
        ROWS,
        model=Classifier(dropout=0.0),
        eval_dataset=ROWS[:7],
        compute_metrics=lambda found: {"rows": float(len(found.predictions))},
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        **given,
    )
    before = one.evaluate()
    one.train()
    after = one.evaluate()
    predicted = one.predict(ROWS[:5]).predictions
    few = one.evaluate(ROWS[:1])
    return {
        "losses": [before["eval_loss"], after["eval_loss"], few["eval_loss"]],
        "rows": [before["eval_rows"], after["eval_rows"], few["eval_rows"]],
        "best": one.state.best_metric,
        "predicted": None if predicted is None else np.array(predicted),
    }


def rates(folder: str, section: dict[str, Any]) -> list[float]:
    """The learning rates of a schedule of DeepSpeed's, stopped and resumed on the way."""
    given: dict[str, Any] = {"max_steps": 6, "logging_strategy": "steps", "logging_steps": 1, "save_steps": 100}
    config = {**zero(2), "scheduler": section, "optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}}
    one = trainer(folder, ROWS, deepspeed=config, callbacks=[StopAfter(3)], learning_rate=5e-5, **given)
    assert one.args.learning_rate == 0.02
    one.train()
    two = trainer(folder, ROWS, deepspeed=config, learning_rate=5e-5, **given)
    two.train("auto")
    assert type(two.lr_scheduler).__name__ == section["type"]
    return [entry["learning_rate"] for entry in two.state.log_history if "learning_rate" in entry]


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


def behaviours(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        for precision in ("fp32", "bf16"):
            given: dict[str, Any] = {"deepspeed": zero(stage), "bf16": precision == "bf16"}
            found[f"poisoned {stage} {precision}"] = train_on_poisoned_rank(
                f"{folder}/poisoned/{stage}{precision}", **given
            )
        found[f"measured {stage}"] = measured(f"{folder}/measured/{stage}", deepspeed=zero(stage))
    found["measured replicas"] = measured(f"{folder}/measured/replicas")
    for kind, params in SCHEDULES.items():
        found[kind] = rates(f"{folder}/{kind}", {"type": kind, "params": params})
    found["exchanged"] = exchanges(f"{folder}/exchanges")
    found["built"] = built(f"{folder}/built")
    found["refused"] = refused(f"{folder}/refused")
    found["members"] = members(f"{folder}/members")
    return found


def exchanges(folder: str) -> dict[str, int]:
    """How often gradients are exchanged in a step of 3 micro-steps."""
    counts: dict[str, int] = {}
    for stage, method in ((1, "reduce_ipg_grads"), (2, "reduce_ipg_grads")):
        one = trainer(
            f"{folder}/{stage}",
            ROWS,
            deepspeed=zero(stage),
            max_steps=1,
            gradient_accumulation_steps=3,
            per_device_train_batch_size=2,
        )
        settle = one._trainflow.engine.strategy.resolve

        def counted(model: Any, optimizer: Any, settle: Any = settle, stage: int = stage, method: str = method) -> Any:
            engine, wrapped = settle(model, optimizer)
            original = getattr(engine.optimizer, method)

            def call(*args: Any, **kwargs: Any) -> Any:
                counts[f"stage {stage}"] = counts.get(f"stage {stage}", 0) + 1
                return original(*args, **kwargs)

            setattr(engine.optimizer, method, call)
            return engine, wrapped

        one._trainflow.engine.strategy.resolve = counted  # type: ignore[method-assign]
        one.train()
    return counts


def built(folder: str) -> dict[str, Any]:
    """A model that model_init builds is divided from the start; one of transformers' is loaded into its parts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    path = Path(folder) / "pretrained"
    if os.environ["RANK"] == "0":
        torch.manual_seed(3)
        GPT2LMHeadModel(config).save_pretrained(path)
    torch.distributed.barrier()
    out: dict[str, Any] = {}
    makers = {
        "plain": Classifier,
        "transformers": lambda: GPT2LMHeadModel.from_pretrained(path),
    }
    for name, make in makers.items():
        rows = ROWS if name == "plain" else [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in TOKENS]
        common: dict[str, Any] = {"max_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
        one = trainer(f"{folder}/{name}", rows, model_init=make, deepspeed=zero(3), **common)
        whole = sum(one._trainflow.engine.strategy.numel(each) for each in one.model.parameters())
        here = sum(each.numel() for each in one.model.parameters())
        counted = one.get_num_trainable_parameters()
        one.train()
        one.save_model(f"{folder}/{name}/exported")
        plain = trainer(f"{folder}/{name}-replicas", rows, model_init=make, **common)
        plain.train()
        losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (one, plain)]
        out[name] = {"whole": whole, "here": here, "counted": counted, "losses": losses}
    if os.environ["RANK"] == "0":
        again = GPT2LMHeadModel.from_pretrained(f"{folder}/transformers/exported")
        out["again"] = sum(each.numel() for each in again.parameters())
    return out


def refused(folder: str) -> dict[str, str]:
    """What only shows once there is a model or an optimizer."""
    texts: dict[str, str] = {}

    def note(name: str, **given: Any) -> None:
        try:
            trainer(f"{folder}/{name}", ROWS, max_steps=1, **given).train()
        except (ConfigError, InfrastructureError) as error:
            texts[name] = str(error)

    note("half model", model=Classifier().bfloat16(), deepspeed=zero(2))
    note("unknown optimizer", deepspeed=zero(2), optimizer_cls_and_kwargs=(Whole, {"lr": 0.1}))
    note("loss module", deepspeed=zero(2), compute_loss_func=ScaledLoss())
    note("untested", deepspeed={**zero(2), "zero_allow_untested_optimizer": False}, optim="sgd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_partitions, "_STAGES_1_2", (*zero_partitions._STAGES_1_2, "what_it_has_not"))
        note("version", deepspeed=zero(2))
    note("schedule", deepspeed={**zero(2), "scheduler": {"type": "OneCycle", "params": {"cycle_min": 1}}})
    return texts


def members(folder: str) -> dict[str, Any]:
    one = trainer(folder, ROWS, deepspeed={**zero(2), "gradient_clipping": 0.5}, max_steps=1, learning_rate=0.01)
    before = one.deepspeed
    with pytest.raises(ConfigError, match="when training begins"):
        one.accelerator.prepare(one.model)
    one.train()
    assert one.accelerator.prepare(one.model) is one.deepspeed
    plugin: Any = one.accelerator.state.deepspeed_plugin
    return {
        "before": before,
        "engine": one.deepspeed is one.model_wrapped and one.accelerator.unwrap_model(one.model_wrapped) is one.model,
        "enabled": (one.is_deepspeed_enabled, one.is_fsdp_enabled, one.place_model_on_device),
        "plugin": (plugin.zero_stage, plugin.zero3_init_flag, plugin.deepspeed_config["gradient_clipping"]),
        "clipping": one.args.max_grad_norm,
        "groups": [sorted(group)[:2] for group in one.optimizer.param_groups],  # type: ignore[union-attr]
        "parameters": sum(len(each) for each in one.get_optimizer_group()) == len(list(one.model.parameters())),
        "of one": one.get_optimizer_group("head.bias")["weight_decay"],
    }


class ScaledLoss(torch.nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs["logits"] * self.scale, labels)


class Whole(torch.optim.SGD):
    """Somebody's own optimizer."""


@pytest.fixture(scope="module")
def behaved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(behaviours, 2, str(tmp_path_factory.mktemp("behaviours")), timeout_s=150)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_nan_on_one_rank_is_skipped_by_all(stage: int, precision: str, behaved: list[dict[str, Any]]) -> None:
    assert [rank[f"poisoned {stage} {precision}"] for rank in behaved] == ["3 2", "3 2"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_evaluations_with_unequal_batches_per_rank(stage: int, behaved: list[dict[str, Any]]) -> None:
    """Nobody waits for a process that has no batch left; the best weights are loaded at the end."""
    for rank in behaved:
        ours, theirs = rank[f"measured {stage}"], rank["measured replicas"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert ours["rows"] == theirs["rows"]
        assert ours["best"] == pytest.approx(theirs["best"], rel=1e-5)
        assert (ours["predicted"] is None) == (theirs["predicted"] is None)
        if ours["predicted"] is not None:
            np.testing.assert_allclose(ours["predicted"], theirs["predicted"], rtol=1e-4, atol=1e-6)


def test_schedules_of_deepspeeds_go_on_where_they_stopped(behaved: list[dict[str, Any]]) -> None:
    found = behaved[0]
    assert found["WarmupLR"] == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.015, 0.02], abs=1e-9)
    assert found["WarmupDecayLR"] == pytest.approx([0.0, 0.0, 0.01, 0.02, 0.015, 0.01], abs=1e-9)
    assert len(found["OneCycle"]) == len(found["LRRangeTest"]) == 6
    assert max(found["OneCycle"]) == pytest.approx(0.03)
    assert found["LRRangeTest"][-1] > found["LRRangeTest"][0]


def test_stage_one_exchanges_nothing_inside_of_a_step(behaved: list[dict[str, Any]]) -> None:
    """Stage 2 has to: no process keeps whole gradients."""
    assert behaved[0]["exchanged"] == {"stage 1": 1, "stage 2": 3}


def test_a_model_is_divided_while_it_is_built(behaved: list[dict[str, Any]]) -> None:
    for rank in behaved:
        for name in ("plain", "transformers"):
            found = rank["built"][name]
            assert found["here"] == 0, "between layers' turns nothing is whole"
            assert found["whole"] == found["counted"] > 0
            assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5)
    assert behaved[0]["built"]["again"] == behaved[0]["built"]["transformers"]["whole"]


def test_what_only_shows_later_is_refused_by_name(behaved: list[dict[str, Any]]) -> None:
    texts = behaved[0]["refused"]
    assert texts.keys() == {"half model", "unknown optimizer", "loss module", "untested", "schedule", "version"}
    assert "optimizer = AdamW: It holds trained parameters that are not the model's" in texts["loss module"]
    assert "bf16=True" in texts["half model"]
    assert "zero_allow_untested_optimizer: true" in texts["unknown optimizer"]
    assert "not one of the optimizers that DeepSpeed tests" in texts["untested"]
    assert "cycle_min" in texts["schedule"]
    assert "it lacks what_it_has_not" in texts["version"]
    assert "deepspeed==0.19.8" in texts["version"]


def test_members_tell_what_trains(behaved: list[dict[str, Any]]) -> None:
    found = behaved[0]["members"]
    assert found["before"] is None
    assert found["engine"]
    assert found["enabled"] == (True, False, False)
    assert found["plugin"] == (2, False, 0.5)
    assert found["clipping"] == 0.5, "the file says it, and the arguments are the one truth"
    assert found["parameters"], "groups show the model's parameters, not what they were cut up into"
    assert found["of one"] == 0.0


def test_the_examples_spec_asks_for_stage_two() -> None:
    """Run by hand: accuracy 0.98 on the test split after 5 epochs on two processes of the CPU."""
    args = TrainingArguments.from_dict(load_spec(ROOT / "examples" / "digits" / "zero.yaml").train.args)
    found = adopt(args)
    assert (found.stage, args.max_grad_norm, found.zero["reduce_bucket_size"]) == (2, 1.0, 1e6)


PLAIN = """
import logging, os, sys
logging.basicConfig(level=logging.WARNING)
from tests.support.toys import classification_rows
from tests.support.training import trainer
rows, given = classification_rows(16), {"max_steps": 2, "optim": "adamw_torch_fused"}
losses = [trainer(f"{sys.argv[1]}/alone", rows, **given).train().training_loss]
for stage in (0, 2, 3):
    config = {"zero_optimization": {"stage": stage}} if stage else {"gradient_clipping": 1.0, "steps_per_print": 9}
    losses.append(trainer(f"{sys.argv[1]}/{stage}", rows, deepspeed=config, **given).train().training_loss)
scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 2}}
one = trainer(f"{sys.argv[1]}/schedule", rows, deepspeed={"scheduler": scheduler}, **given)
one.train()
print("LOSSES", *losses, type(one.lr_scheduler).__module__)
"""


def test_plain_python_trains_with_every_stage_and_stage_0_is_training_without_it(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-c", PLAIN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("LOSSES")]
    *losses, schedule = line.split()[1:]
    assert [float(loss) for loss in losses] == pytest.approx([float(losses[0])] * 4, rel=1e-6)
    assert schedule == "deepspeed.runtime.lr_schedules"
    assert "these parts have no effect: steps_per_print." in done.stderr
