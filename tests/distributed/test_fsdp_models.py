"""Real models divided over processes: layers of transformers, tied and frozen weights, adapters."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.distributed import loaded, run_distributed
from tests.support.tiny_models import llama, lm_rows
from tests.support.training import trainer
from trainer_lib import Trainer
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.storage import Store
from trainer_lib.strategies.fsdp.fsdp_strategy import parameter_bytes

RAGGED = lm_rows(11)
RUN: dict[str, Any] = {
    "num_train_epochs": 1,
    "global_batch_size": 4,
    "per_device_train_batch_size": 1,
    "logging_strategy": "steps",
    "logging_steps": 1,
}
LAYERS = {"fsdp": "full_shard auto_wrap"}


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    with loaded("transformers.models.llama.modeling_llama", "peft"):
        yield


def losses(one: Trainer) -> list[float]:
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


def whole(one: Trainer) -> dict[str, torch.Tensor]:
    state = one._trainflow.engine.strategy.model_state(one.model_wrapped)
    return {name: value for name, value in state.items() if not value.is_meta}


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def tied_and_frozen() -> Any:
    model = tied()
    model.model.layers[0].requires_grad_(False)
    return model


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    warnings.filterwarnings("ignore", category=FutureWarning)
    base = llama()
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


MODELS: dict[str, Any] = {"layers": llama, "tied": tied_and_frozen, "adapters": adapted}


def trained(folder: str, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    one = trainer(f"{folder}/{kind}", RAGGED, model=MODELS[kind](), **RUN, **given)
    one.train()
    one.save_model(f"{folder}/{kind}/model")
    parts = sum(type(each).__name__ == "LlamaDecoderLayer" for each in one.model.modules())
    return {"losses": losses(one), "state": whole(one), "parts": parts, "bytes": parameter_bytes(one.model)}


def all_kinds(folder: str) -> dict[str, dict[str, Any]]:
    again = {**LAYERS, "fsdp_config": {"activation_checkpointing": True}}
    return {
        **{kind: trained(folder, kind, LAYERS) for kind in MODELS},
        "recomputed": trained(f"{folder}/again", "tied", {**LAYERS, "gradient_checkpointing": True}),
        "part by part": trained(f"{folder}/parts", "tied", again),
    }


def everything(folder: str) -> dict[str, Any]:
    """One group of processes for all tests: importing these packages takes longer than they do."""
    return {
        "kinds": all_kinds(f"{folder}/two"),
        "sparing": sparing(f"{folder}/sparing"),
        "resumed": best_and_resumed(f"{folder}/resumed"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(everything, 2, str(folder), timeout_s=120)


def test_layers_tied_and_frozen_weights_and_adapters_train_as_on_one_process(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    alone = {kind: trained(str(folder / "one"), kind, {}) for kind in MODELS}
    alone |= {"recomputed": alone["tied"], "part by part": alone["tied"]}
    first, second = (rank["kinds"] for rank in ranks)
    for kind, expected in alone.items():
        assert first[kind]["losses"] == second[kind]["losses"]
        assert first[kind]["losses"] == pytest.approx(expected["losses"], rel=1e-6), kind
        assert first[kind]["parts"] == 2, "classes keep their names"
        assert first[kind]["state"].keys() == expected["state"].keys()
        for name, value in first[kind]["state"].items():
            torch.testing.assert_close(value, expected["state"][name], rtol=1e-4, atol=1e-6, msg=f"{kind} {name}")
        assert sum(rank[kind]["bytes"][0] for rank in (first, second)) == expected["bytes"][1]
    for kind in ("layers", "tied"):
        exported = [load_file(folder / which / kind / "model" / "model.safetensors") for which in ("one", "two")]
        assert exported[0].keys() == exported[1].keys()
    config = json.loads((folder / "two" / "layers" / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "two" / "adapters" / "model" / "adapter_model.safetensors").is_file()


# ---------------------------------------------------------------------------------------------- built on one rank only
def from_folder(model: str) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model)


def sparing(folder: str) -> list[Any]:
    """A model whose values the first rank alone has; the others never hold the whole."""
    found = []
    if os.environ["RANK"] == "0":
        llama().save_pretrained(f"{folder}/source")
    torch.distributed.barrier()
    for name, init in (("built", llama), ("loaded", lambda: from_folder(f"{folder}/source"))):
        given: dict[str, Any] = {**LAYERS, "fsdp_config": {"cpu_ram_efficient_loading": True}}
        one = trainer(f"{folder}/{name}", RAGGED, model_init=init, **RUN, **given)
        before = {each.is_meta for each in one.model.parameters()}
        one.train()
        found.append((before, losses(one), parameter_bytes(one.model)))
    return found


def test_only_the_first_rank_builds_the_model_with_its_values(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = trainer(tmp_path / "one", RAGGED, model=llama(), **RUN)
    alone.train()
    first, second = (rank["sparing"] for rank in ranks)
    for mine, theirs in zip(first, second, strict=True):
        assert (mine[0], theirs[0]) == ({False}, {True})
        assert mine[1] == theirs[1] == pytest.approx(losses(alone), rel=1e-6)
        assert mine[2][0] + theirs[2][0] == parameter_bytes(alone.model)[1]


# ------------------------------------------------------------------------------------------------- resuming, best model
def resumed(folder: str, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Three steps with an evaluation each, the best model at the end; then a second run from the second step."""
    settings = {**RUN, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, **given}
    settings |= {"metric_for_best_model": "marked", "greater_is_better": True, "load_best_model_at_end": True}
    measured = iter([1.0, 3.0, 2.0, 2.0])

    def metrics(p: Any) -> dict[str, float]:
        return {"marked": next(measured)}

    own: dict[str, Any] = {"eval_dataset": RAGGED[:5], "compute_metrics": metrics}
    one = trainer(f"{folder}/{kind}", RAGGED, model=MODELS[kind](), **own, **settings)
    one.train()
    assert one.state.best_global_step == 2
    other = trainer(f"{folder}/{kind}", RAGGED, model=MODELS[kind](), **RUN, **given)
    other.train(f"{folder}/{kind}/checkpoint-2")
    store = Store.open(f"{folder}/{kind}")
    saved = {
        step: dict(load_checkpoint(store, f"checkpoint-{step}", one._trainflow.comm).read_model()) for step in (2, 3)
    }
    return {"best": whole(one), "resumed": whole(other), "saved": saved}


def best_and_resumed(folder: str) -> dict[str, dict[str, Any]]:
    full = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
    return {"tied": resumed(folder, "tied", LAYERS), "adapters": resumed(folder, "adapters", full)}


def test_the_best_model_comes_back_and_resuming_is_exact(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["resumed"] for rank in ranks)
    assert not second["tied"]["best"]
    for kind, found in first.items():
        for name, value in found["saved"][3].items():
            assert torch.equal(found["resumed"][name], value), f"{kind} {name}"
            assert torch.equal(found["best"][name], found["saved"][2][name]), f"{kind} {name}"
        assert any(not torch.equal(value, found["saved"][2][name]) for name, value in found["saved"][3].items())


# ----------------------------------------------------------------------------------------------------------- bad models
class Scaled(nn.Module):
    """A trained parameter without a dimension; a layer that shares a weight with another."""

    def __init__(self, *, scalar: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=scalar)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.norm(self.other(self.one(x)) * self.scale), labels)


def refusals(folder: str) -> list[str]:
    from tests.support.toys import classification_rows

    rows = classification_rows(8)
    cases: list[tuple[bool, dict[str, Any]]] = [
        (True, {"fsdp": "full_shard"}),
        (False, {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Linaer"]}}),
        (False, {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Linear"]}}),
        (False, {"fsdp": "full_shard auto_wrap"}),
        (False, {"fsdp": "full_shard", "fsdp_config": {"ignored_modules": "nrom"}}),
        (False, {"fsdp": "full_shard", "fsdp_config": {"ignored_modules": "norm"}}),
        (False, {"fsdp": "hybrid_shard", "fsdp_config": {"hybrid_group_size": 3}}),
    ]
    told = []
    for scalar, given in cases:
        with pytest.raises(Exception) as caught:
            trainer(folder, rows, model=Scaled(scalar=scalar), **given)
        told.append(f"{type(caught.value).__name__} {caught.value}")
    trainer(
        folder, rows, model=Scaled(scalar=False), fsdp="full_shard", max_steps=1
    ).train()  # a frozen scalar does no harm
    return told


def test_models_that_cannot_be_divided_are_refused_when_the_trainer_is_built(tmp_path: Path) -> None:
    first, second = run_distributed(refusals, 2, str(tmp_path))
    assert first == second
    expected = [
        "scale has no dimension",
        'has no module of that class.*Did you mean "Linear"',
        "shares .*weight with another part",
        "does not say which of its layers belong together",
        "matches no module",
        "norm.weight is trained",
        "does not divide 2 processes",
    ]
    for text, pattern in zip(first, expected, strict=True):
        assert text.startswith("ConfigError")
        assert re.search(pattern, text), text
