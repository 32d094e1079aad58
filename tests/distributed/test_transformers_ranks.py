"""Models of transformers on two ranks, as replicas and divided: losses, generation, adapters, resuming."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.chat_cases import chat_rows, family_tokenizer, new_model
from tests.support.distributed import loaded, run_distributed
from tests.support.gradients import assert_close, gradients
from tests.support.named_recipes import TINY, prepare_sources
from tests.support.named_recipes import trained as trained_recipe
from tests.support.seq2seq import Copier, Tokens, rows, seq2seq_trainer, t5
from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from tests.support.toys import classification_rows
from tests.support.training import LOGGED, losses, trainer, whole_state
from trainer_lib import DataCollatorForSeq2Seq
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.errors import ConfigError
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, load
from trainer_lib.recipes.texts.templates import TEMPLATES
from trainer_lib.storage import Store
from trainer_lib.strategies.fsdp import parameter_bytes
from trainflow.flows.new_project.starting import read_sample


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    with loaded("transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5", "peft"):
        yield


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    warnings.filterwarnings("ignore", category=FutureWarning)
    base = llama()
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


# ------------------------------------------------------------------------------------------------------------- replicas
def classifier() -> Any:
    return bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def first_step(kind: str, micro: int) -> Any:
    decoder = kind == "decoder"
    batch, model = (lm_rows(24), llama) if decoder else (text_rows(24), classifier)
    return gradients(batch, micro=micro, batch=11, model=model, label_smoothing_factor=0.0 if decoder else 0.1)


def judged_steps(name: str, folder: str, rows: list[Any], data: DataInfo, model: dict[str, Any], size: int) -> Any:
    """The weights after three steps on 11 rows each, in micro-batches of a size; and the last divergence."""
    made = load(recipe_file(name), folder), {"train": rows}, data
    settings: dict[str, Any] = {"per_device_train_batch_size": size, "global_batch_size": 11, "learning_rate": 1e-3}
    one = trained_recipe(made, Path(folder), model, 3, **settings)
    divergence = float(getattr(one, "_divergence", 1))
    assert divergence > 0.1
    return [*(each.detach().numpy() for each in one.model.parameters()), divergence]


@pytest.mark.parametrize(
    ("name", "made", "options", "model"),
    [
        ("feedback-optimization", "marked_lines.csv", {"config": TINY}, {}),
        ("reward-modeling", "ranked_lines.csv", {}, {"config": TINY}),
        ("preference-optimization", "word_orders.jsonl", {"config": TINY}, {"loss": "orpo"}),
    ],
)
def test_two_ranks_learn_from_judged_answers_like_one(
    name: str, made: str, options: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    """The divergence from the reference is that of all rows of a step, on whichever rank they are."""
    (path := tmp_path / made).write_text("".join(read_sample(made).splitlines(keepends=True)[:101]))
    _, splits, data = prepare_sources(name, [str(path)], {**options, "vocabulary": 400, "max_length": 96}, tmp_path)
    rows = [{**row, "labels": 1} for row in splits["train"][:33]]  # good ones alone: the model moves away
    given = str(tmp_path), rows, data, model
    [alone] = run_distributed(judged_steps, 1, name, *given, 11)
    for of_rank in run_distributed(judged_steps, 2, name, *given, 2):
        for value, expected in zip(of_rank, alone, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["decoder", "classifier"])
def test_two_ranks_have_the_loss_and_gradients_of_one_big_batch(kind: str) -> None:
    """11 rows in micro-batches of 3: 6 rows on one rank, 5 on the other, unequal token counts everywhere."""
    whole = first_step(kind, 11)
    for part in run_distributed(first_step, 2, kind, 3):
        assert_close(part, whole, rtol=1e-4, atol=1e-7)


def with_adapters(folder: str) -> tuple[int, float]:
    saves: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    training = trainer(folder, lm_rows(16), model=adapted(), include_num_input_tokens_seen="all", **saves)
    training.train()
    training.save_model()
    return training.state.num_input_tokens_seen, training.state.total_flos


def test_ranks_write_one_set_of_adapters_and_add_up_tokens_and_operations(tmp_path: Path) -> None:
    tokens = 2 * 2 * 4 * 8
    weights = llama().num_parameters(exclude_embeddings=True) + 2 * (16 * 2 + 2 * 16)
    assert run_distributed(with_adapters, 2, str(tmp_path)) == [(tokens, 6 * weights * tokens)] * 2
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert (tmp_path / "checkpoint-2" / "adapter_config.json").is_file()


# -------------------------------------------------------------------------------------------------------- conversations
def on_conversations(folder: str, packed: bool, order: str, micro: int) -> dict[str, Any]:
    """Train on answers of unequal lengths, eight rows of 96 tokens at most in a step."""
    made, collate = chat_rows(TEMPLATES["plain"], packed=packed, count=60, length=96)
    model = new_model(len(family_tokenizer()))
    given: dict[str, Any] = {"global_batch_size": 8, "per_device_train_batch_size": micro, "num_train_epochs": 2}
    given |= {"optim": "sgd", "learning_rate": 0.5}  # Adam makes steps of rounding, too
    given |= {"train_sampling_strategy": order, "remove_unused_columns": False, **LOGGED}
    training = trainer(folder, made, model=model, data_collator=collate, **given)
    training.train()
    return {"losses": losses(training), "weights": {name: v.numpy() for name, v in model.state_dict().items()}}


@pytest.mark.parametrize(("packed", "order"), [(True, "random"), (False, "group_by_length")])
def test_answers_weigh_by_their_tokens_in_micro_batches_and_on_ranks(tmp_path: Path, packed: bool, order: str) -> None:
    whole = on_conversations(str(tmp_path / "whole"), packed, order, 8)
    assert whole["losses"][0] > whole["losses"][-1]
    parts = [on_conversations(str(tmp_path / "parts"), packed, order, 2)]
    parts += run_distributed(on_conversations, 2, str(tmp_path / "ranks"), packed, order, 2)
    for part in parts:
        assert part["losses"] == pytest.approx(whole["losses"], rel=1e-5, abs=1e-6)
        for name, value in whole["weights"].items():
            np.testing.assert_allclose(part["weights"][name], value, rtol=2e-5, atol=1e-6, err_msg=name)


# ----------------------------------------------------------------------------------------------------------- generation
PAIRS = rows(11)  # 3 a batch and rank: the last round leaves one rank with two rows and another with none


def predicted(folder: str, kind: str) -> dict[str, Any]:
    """The same predictions as on one process, in the dataset's order, none twice."""
    calls: list[int] = []

    def compute(p: Any) -> dict[str, float]:
        calls.append(len(p.predictions))
        return {"tokens": float(p.predictions.sum()), "samples": len(p.predictions)}

    model = t5() if kind == "t5" else Copier()
    collate = DataCollatorForSeq2Seq(Tokens(), model=model)
    training = seq2seq_trainer(folder, model, eval_dataset=PAIRS, compute_metrics=compute, data_collator=collate)
    if kind == "copier":
        model.table.weight.data.fill_(0.5)
    output = training.predict(PAIRS, max_length=7)
    metrics = training.evaluate(num_beams=2)
    if kind == "copier":
        with pytest.raises(ConfigError, match=r"top_p = 0.5: Copier.generate does not take this setting"):
            training.predict(PAIRS, top_p=0.5)
    return {
        "predictions": None if output.predictions is None else np.array(output.predictions),
        "labels": None if output.label_ids is None else np.maximum(output.label_ids, 0),
        "measured": [output.metrics["test_loss"], *(metrics[f"eval_{name}"] for name in ("loss", "tokens", "samples"))],
        "calls": calls,
    }


@pytest.mark.parametrize("kind", ["t5", "copier"])
def test_two_processes_predict_what_one_does(tmp_path: Path, kind: str) -> None:
    alone = predicted(str(tmp_path / "one"), kind)
    first, second = run_distributed(predicted, 2, str(tmp_path / "two"), kind)
    assert alone["predictions"].shape == (11, 7)
    assert np.array_equal(first["predictions"], alone["predictions"])
    assert np.array_equal(first["labels"], alone["labels"])
    assert second["predictions"] is None
    assert (first["calls"], second["calls"]) == ([11, 11], [])
    for rank in (first, second):
        assert rank["measured"] == pytest.approx(alone["measured"], rel=1e-6)


# ----------------------------------------------------------------------------------------------- divided over processes
RAGGED = lm_rows(11)
RUN: dict[str, Any] = {"num_train_epochs": 1, "global_batch_size": 4, "per_device_train_batch_size": 1, **LOGGED}
LAYERS = {"fsdp": "full_shard auto_wrap"}


def tied_and_frozen() -> Any:
    model = llama(tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    return model


MODELS: dict[str, Any] = {"layers": llama, "tied": tied_and_frozen, "adapters": adapted}


def trained(folder: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    training = trainer(f"{folder}/{kind}", RAGGED, model=MODELS[kind](), **RUN, **settings)
    training.train()
    training.save_model(f"{folder}/{kind}/model")
    parts = sum(type(module).__name__ == "LlamaDecoderLayer" for module in training.model.modules())
    size = parameter_bytes(training.model)
    return {"losses": losses(training), "state": whole_state(training), "parts": parts, "bytes": size}


def all_kinds(folder: str) -> dict[str, dict[str, Any]]:
    again = {**LAYERS, "fsdp_config": {"activation_checkpointing": True}}
    return {
        **{kind: trained(folder, kind, LAYERS) for kind in MODELS},
        "recomputed": trained(f"{folder}/again", "tied", {**LAYERS, "gradient_checkpointing": True}),
        "part by part": trained(f"{folder}/parts", "tied", again),
    }


def test_layers_tied_and_frozen_weights_and_adapters_train_as_on_one_process(tmp_path: Path) -> None:
    first, second = run_distributed(all_kinds, 2, str(tmp_path / "two"), timeout_s=120)
    alone = {kind: trained(str(tmp_path / "one"), kind, {}) for kind in MODELS}
    alone |= {"recomputed": alone["tied"], "part by part": alone["tied"]}
    for kind, expected in alone.items():
        assert first[kind]["losses"] == second[kind]["losses"]
        assert first[kind]["losses"] == pytest.approx(expected["losses"], rel=1e-6), kind
        assert first[kind]["parts"] == 2, "classes keep their names"
        assert first[kind]["state"].keys() == expected["state"].keys()
        for name, value in first[kind]["state"].items():
            torch.testing.assert_close(value, expected["state"][name], rtol=1e-4, atol=1e-6, msg=f"{kind} {name}")
        assert sum(rank[kind]["bytes"][0] for rank in (first, second)) == expected["bytes"][1]
    for kind in ("layers", "tied"):
        exported = [load_file(tmp_path / which / kind / "model" / "model.safetensors") for which in ("one", "two")]
        assert exported[0].keys() == exported[1].keys()
    config = json.loads((tmp_path / "two" / "layers" / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "two" / "adapters" / "model" / "adapter_model.safetensors").is_file()


def sparing(folder: str) -> list[Any]:
    """A model whose values the first rank alone has; the others never hold the whole."""
    from transformers import LlamaForCausalLM

    if os.environ["RANK"] == "0":
        llama().save_pretrained(f"{folder}/source")
    ends = []
    settings: dict[str, Any] = {**LAYERS, "fsdp_config": {"cpu_ram_efficient_loading": True}}
    for name in ("built", "loaded"):
        init = llama if name == "built" else lambda: LlamaForCausalLM.from_pretrained(f"{folder}/source")
        training = trainer(f"{folder}/{name}", RAGGED, model_init=init, **RUN, **settings)
        before = {value.is_meta for value in training.model.parameters()}
        training.train()
        ends.append((before, losses(training), parameter_bytes(training.model)))
    return ends


def test_only_the_first_rank_builds_the_model_with_its_values(tmp_path: Path) -> None:
    first, second = run_distributed(sparing, 2, str(tmp_path / "two"))
    alone = trainer(tmp_path / "one", RAGGED, model=llama(), **RUN)
    alone.train()
    for mine, theirs in zip(first, second, strict=True):
        assert (mine[0], theirs[0]) == ({False}, {True})
        assert mine[1] == theirs[1] == pytest.approx(losses(alone), rel=1e-6)
        assert mine[2][0] + theirs[2][0] == parameter_bytes(alone.model)[1]


def resumed(folder: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Three steps with an evaluation each, the best model at the end; then a second run from the second step."""
    steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    steps |= {"metric_for_best_model": "marked", "greater_is_better": True, "load_best_model_at_end": True}
    marks = iter([1.0, 3.0, 2.0, 2.0])
    steps |= {"eval_dataset": RAGGED[:5], "compute_metrics": lambda p: {"marked": next(marks)}}
    training = trainer(f"{folder}/{kind}", RAGGED, model=MODELS[kind](), **RUN, **steps, **settings)
    training.train()
    assert training.state.best_global_step == 2
    other = trainer(f"{folder}/{kind}", RAGGED, model=MODELS[kind](), **RUN, **settings)
    other.train(f"{folder}/{kind}/checkpoint-2")
    store, comm = Store.open(f"{folder}/{kind}"), training._trainflow.comm
    saved = {step: dict(load_checkpoint(store, f"checkpoint-{step}", comm).read_model()) for step in (2, 3)}
    return {"best": whole_state(training), "resumed": whole_state(other), "saved": saved}


def best_and_resumed(folder: str) -> dict[str, dict[str, Any]]:
    full = {**LAYERS, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
    return {"tied": resumed(folder, "tied", LAYERS), "adapters": resumed(folder, "adapters", full)}


def test_the_best_model_comes_back_and_resuming_is_exact(tmp_path: Path) -> None:
    first, second = run_distributed(best_and_resumed, 2, str(tmp_path))
    assert not second["tied"]["best"]
    for kind, end in first.items():
        for name, value in end["saved"][3].items():
            assert torch.equal(end["resumed"][name], value), f"{kind} {name}"
            assert torch.equal(end["best"][name], end["saved"][2][name]), f"{kind} {name}"
        assert any(not torch.equal(value, end["saved"][2][name]) for name, value in end["saved"][3].items())


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


#: Whether the scalar is trained, the arguments, and the refusal.
BAD: list[tuple[bool, str, dict[str, Any], str]] = [
    (True, "full_shard", {}, "scale has no dimension"),
    (False, "full_shard", {"transformer_layer_cls_to_wrap": ["Linaer"]}, 'of that class.*Did you mean "Linear"'),
    (False, "full_shard", {"transformer_layer_cls_to_wrap": ["Linear"]}, "shares .*weight with another part"),
    (False, "full_shard auto_wrap", {}, "does not say which of its layers belong together"),
    (False, "full_shard", {"ignored_modules": "nrom"}, "matches no module"),
    (False, "full_shard", {"ignored_modules": "norm"}, "norm.weight is trained"),
    (False, "hybrid_shard", {"hybrid_group_size": 3}, "does not divide 2 processes"),
]


def refusals(folder: str) -> list[str]:
    samples, told = classification_rows(8), []
    for scalar, mode, config, _ in BAD:
        with pytest.raises(ConfigError) as caught:
            trainer(folder, samples, model=Scaled(scalar=scalar), fsdp=mode, fsdp_config=config)
        told.append(str(caught.value))
    # A frozen scalar does no harm.
    trainer(folder, samples, model=Scaled(scalar=False), fsdp="full_shard", max_steps=1).train()
    return told


def test_models_that_cannot_be_divided_are_refused_when_the_trainer_is_built(tmp_path: Path) -> None:
    first, second = run_distributed(refusals, 2, str(tmp_path))
    assert first == second
    for text, (*_, pattern) in zip(first, BAD, strict=True):
        assert re.search(pattern, text), text
