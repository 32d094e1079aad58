"""In any layout of processes, a model trains, is measured, clipped and stopped as on one process."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from benchmarks.step_overhead import CallCounter
from tests.support import seq2seq
from tests.support.distributed import loaded, run_distributed
from tests.support.tiny_models import bert, llama, lm_rows
from tests.support.training import LOGGED, arguments, losses, norms, trainer, whole_state
from trainer_lib import Trainer, TrainerCallback, default_data_collator
from trainer_lib.data.rows.mixture import Mixture, Piece
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.strategies.fsdp import parameter_bytes
from trainer_lib.worker.estimate import _gathered_bytes

COUNT = 14
ROWS = lm_rows(COUNT)
#: 14 rows with unequal token counts in global batches of 8: the second step has 6.
RAGGED: dict[str, Any] = {"max_steps": 2, "global_batch_size": 8, "per_device_train_batch_size": 2, **LOGGED}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4}
LAYOUTS: dict[str, dict[str, int]] = {
    "tensor 4": {"tensor": 4},
    "replicas": {"replicate": 4},
    "replicas of tensor": {"replicate": 2, "tensor": 2},
    "shards": {"shard": 4},
    "shards of tensor": {"shard": 2, "tensor": 2},
    "copies of shards": {"replicate": 2, "shard": 2},
}
#: What else a training may ask for, in the layout that it is tried in.
ASKED: dict[str, dict[str, Any]] = {
    "smoothed": {"label_smoothing_factor": 0.1},
    "recomputed": {"gradient_checkpointing": True},
    "but for products": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"save": ["mm", "sdpa"]}},
    "plain loops": {"optim": "sgd", "optim_args": "foreach=False"},
    "foreach": {"optim": "adamw_torch"},
    "unclipped": {"max_grad_norm": 0.0},
}


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    kinds = ("llama", "mistral", "qwen3", "mixtral", "qwen3_moe")
    with loaded(*(f"transformers.models.{kind}.modeling_{kind}" for kind in kinds)):
        yield


SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": 0, **HEADS}


def built(kind: str, **given: Any) -> Any:
    """A small causal language model of a kind of transformers', always with the same weights."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **given})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def qwen(**given: Any) -> Any:
    """Norms of heads, which stay whole between divided layers; embedding and head are tied."""
    return built("Qwen3", vocab_size=33, tie_word_embeddings=True, **given)


def mixtral() -> Any:
    """Four experts, whose weights are one tensor."""
    return built("Mixtral", vocab_size=33, num_local_experts=4)


def mixture(kind: str = "Mixtral", **given: Any) -> Any:
    """Four experts, of which a token takes two; the router's loss counts."""
    number = "num_local_experts" if kind == "Mixtral" else "num_experts"
    sizes = {"moe_intermediate_size": 24, "vocab_size": 32, "num_experts_per_tok": 2, number: 4}
    return built(kind, **{**sizes, "output_router_logits": True, "router_aux_loss_coef": 0.1, **given})


def partial_mixture() -> Any:
    """A mixture whose router sends every token to the same two experts, which one process holds."""
    made = mixture(experts_implementation="eager")
    for layer in made.model.layers:
        nn.init.zeros_(layer.mlp.gate.weight)
        layer.mlp.gate.weight.requires_grad = False
    return made


class Halves(nn.Module):
    """A network of the user's own: biases, dropout between divided layers, no plan."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 32)
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        self.seen = self.inner(torch.relu(self.up(hidden)))
        self.out = self.outer(hidden + self.down(self.seen))
        logits = self.head(self.out)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


PLAN = {"up": "colwise", "down": "rowwise", "embedding": "embedding_rowwise", "head": "colwise_gather_output"}


class OwnLoss(Trainer):
    """A mean over each micro-batch's own targets, computed outside of the model."""

    @override
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


MODELS: dict[str, Any] = {
    "llama": lambda: llama(**HEADS),
    "shared": lambda: llama(**{**HEADS, "num_key_value_heads": 1}),
    "qwen": qwen,
    "window": lambda: built("Mistral", vocab_size=32, sliding_window=5),  # in all layers
    "windows": lambda: qwen(use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "own": Halves,
    "mixtral": mixture,
    "partial": partial_mixture,
    "frozen": lambda: frozen(mixture(), "experts"),
    "qwen mixture": lambda: mixture("Qwen3Moe"),
}


def trained(
    folder: str, model: str = "llama", layout: Mapping[str, Any] | None = None, length: int = 8, **given: Any
) -> dict[str, Any]:
    """Losses and norms of a training, an evaluation and predictions after it, and what this rank held."""
    made: Any = MODELS[model]()
    asked = {} if layout is None else {"parallelism": dict(layout)}
    one = trainer(folder, lm_rows(COUNT, length=length), model=made, **{**RAGGED, **given, **asked})
    one.train()
    measured = lm_rows(9, seed=3, length=length)
    metrics, predicted = one.evaluate(measured), one.predict(measured).predictions
    if isinstance(predicted, tuple):  # a mixture's router answers too
        predicted = next(each for each in predicted if each.shape[-1] == 32)
    return {
        "losses": losses(one),
        "norms": norms(one),
        "evaluated": metrics["eval_loss"],
        "predicted": None if predicted is None else torch.as_tensor(predicted),
        "state": whole_state(one),
        "bytes": parameter_bytes(one.model),
        "divided": sorted(name for name, each in one.model.named_parameters() if isinstance(each, DTensor)),
        "tokens": one.state.num_input_tokens_seen,
        "flops": one.state.total_flos,
        "groups": [len(group["params"]) for group in one.optimizer.param_groups],  # type: ignore[union-attr]
        "described": one._trainflow.engine.strategy.describe(),
    }


def several(folder: str, cases: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: trained(f"{folder}/{number}", **given) for number, (name, given) in enumerate(cases.items())}


def in_two(sizes: Mapping[str, int]) -> dict[str, int]:
    """The setting with which every process takes two micro-batches in a step: what they exchange is what takes time."""
    return {"per_device_train_batch_size": 4 // (sizes.get("replicate", 1) * sizes.get("shard", 1))}


def close(one: dict[str, Any], alone: dict[str, Any]) -> None:
    assert one["losses"] == pytest.approx(alone["losses"], rel=2e-6)
    assert one["norms"] == pytest.approx(alone["norms"], rel=2e-6)
    assert one["evaluated"] == pytest.approx(alone["evaluated"], rel=2e-6)
    assert (one["groups"], one["tokens"]) == (alone["groups"], alone["tokens"])
    if set(one["described"].get("layout", ["shard"])) <= {"tensor", "sequence"}:  # others have dummy batches
        assert one["flops"] == alone["flops"]
    for name, value in one["state"].items():
        torch.testing.assert_close(value, alone["state"][name], rtol=1e-3, atol=2e-5, msg=name)
    if one["predicted"] is not None:
        torch.testing.assert_close(one["predicted"], alone["predicted"], rtol=1e-3, atol=2e-5)


COUNTED: dict[str, Any] = {"include_num_input_tokens_seen": "all", "max_steps": 3}  # the third in another epoch


def test_layouts_have_the_losses_and_weights_of_one_process(tmp_path: Path) -> None:
    alone = trained(str(tmp_path / "alone"), **COUNTED)
    cases = {name: {"layout": sizes, **in_two(sizes), **COUNTED} for name, sizes in LAYOUTS.items()}
    ranks = run_distributed(several, 4, str(tmp_path / "four"), cases, timeout_s=180)
    for results in ranks:
        for one in results.values():
            close(one, alone)
    assert all((rank["tensor 4"]["predicted"] is None) == (number > 0) for number, rank in enumerate(ranks))
    first = ranks[0]
    whole = first["replicas"]["bytes"][1]
    held = [first[name]["bytes"][0] for name in ("tensor 4", "shards of tensor")]
    assert held == pytest.approx([whole / 4] * 2, rel=0.1)
    assert first["shards of tensor"]["described"] == {
        "strategy": "tensor",
        "fsdp": "full_shard",
        "layout": {"shard": 2, "tensor": 2},
    }
    assert not [name for name in first["tensor 4"]["divided"] if "norm" in name]


def test_what_a_training_asks_for_is_served_in_divided_layers(tmp_path: Path) -> None:
    more: dict[str, dict[str, Any]] = {
        **ASKED,
        "counted": COUNTED,
        "own loss": {"cls": OwnLoss},
        "tied": {"model": "qwen"},
        "network": {"model": "own"},
    }
    for sizes in ({"tensor": 2}, {"tensor": 2, "shard": 2}):
        cases = {
            name: {**in_two(sizes), **given, "layout": {**sizes, **({"plan": PLAN} if name == "network" else {})}}
            for name, given in more.items()
        }
        ranks = run_distributed(several, 2 * sizes.get("shard", 1), str(tmp_path / str(sizes)), cases, timeout_s=180)
        for name, given in more.items():
            expected = trained(str(tmp_path / name), **given)
            for results in ranks:
                close(results[name], expected)
        if len(sizes) == 1:
            weights = [f"{name}.weight" for name in ("up", "down", "head", "embedding")]
            # The bias behind a sum stays whole.
            assert ranks[0]["network"]["divided"] == sorted([*weights, "up.bias", "head.bias"])


def counted(folder: str, cases: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """Calls of Python in a step."""
    found = {}
    for name, given in cases.items():
        counter = CallCounter()
        callback = TrainerCallback()
        callback.on_step_end = lambda *_, count=counter, **__: count.stamp()  # type: ignore[method-assign]
        one = trainer(folder, lm_rows(80), model=llama(**HEADS), max_steps=5, callbacks=[callback], **given)
        try:
            one.train()
        finally:
            sys.setprofile(None)
        found[name] = statistics.median(counter.python[-3:])
    return found


def test_divided_layers_call_python_little_more_than_shards_do(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "shards": {"fsdp": "full_shard auto_wrap"},
        "tensor": {"parallelism": {"tensor": 4}},
        "shards of tensor": {"parallelism": {"shard": 2, "tensor": 2}},
        "replicas of tensor": {"parallelism": {"replicate": 2, "tensor": 2}},
    }
    for calls in run_distributed(counted, 4, str(tmp_path), cases):
        shards = calls.pop("shards")
        assert all(0 < number <= 1.2 * shards for number in calls.values()), (shards, calls)


MIXTURES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "sent": {"model": "mixtral", "layout": {"expert": 2}},
        "sent to frozen ones": {"model": "frozen", "layout": {"expert": 2}},
        "sent to others": {"model": "qwen mixture", "layout": {"expert": 2}},
        "sent to one": {"model": "partial", "layout": {"expert": 2}},
        "sent again": {"model": "partial", "layout": {"expert": 2}, "gradient_checkpointing": True},
    },
    4: {
        "sent to single ones": {"model": "mixtral", "layout": {"expert": 4}},
        "sent in shards": {"model": "mixtral", "layout": {"shard": 2, "expert": 2}},
        "sent in replicas": {"model": "mixtral", "layout": {"replicate": 2, "expert": 2}},
    },
}


@pytest.mark.parametrize("world", MIXTURES)
def test_divided_experts_train_as_on_one_process(tmp_path: Path, world: int) -> None:
    cases = MIXTURES[world]
    ranks = run_distributed(several, world, str(tmp_path / "ranks"), cases, timeout_s=180)
    models = {given["model"] for given in cases.values()}
    alone = {model: trained(str(tmp_path / model), model=model) for model in models}
    for name, given in cases.items():
        for results in ranks:
            close(results[name], alone[given["model"]])
    if world == 2:
        at_once = trained(str(tmp_path / "at once"), model="mixtral", per_device_train_batch_size=8)
        assert alone["mixtral"]["losses"] == pytest.approx(
            at_once["losses"], rel=0.01
        )  # the routers' part is once there
        here, everywhere = ranks[1]["sent"]["bytes"]
        assert here == pytest.approx(everywhere / 2, rel=0.05)
        name = "model.layers.0.mlp.experts.down_proj"
        pairs = zip(partial_mixture().state_dict()[name], alone["partial"]["state"][name], strict=True)
        moved = [not torch.equal(before, after) for before, after in pairs]
        assert moved in ([True, True, False, False], [False, False, True, True])


def test_a_plan_gathers_a_part_of_experts_that_are_sent_tokens(tmp_path: Path) -> None:
    layer = mixture().model.layers[0]
    shared, sent = (_gathered_bytes(mixture(), arguments(tmp_path, parallelism={n: 2})) for n in ("shard", "expert"))
    assert shared - sent == sum(each.nbytes for each in layer.mlp.experts.parameters()) / 2
    with pytest.raises(ConfigError, match="has no experts"):
        _gathered_bytes(llama(), arguments(tmp_path, parallelism={"expert": 2}))


#: Layouts, and what a training asks for in them; one head of keys and values is repeated, seven tokens are padded.
DIVIDED_TOKENS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"global_batch_size": 8, "per_device_train_batch_size": 1},
    "own loss": {"cls": OwnLoss},
    "tied": {"model": "qwen"},
    "one head of keys": {"model": "shared"},
    "seven tokens": {"length": 7},
    "window": {"model": "window"},
    "windows": {"model": "windows"},
    **{name: ASKED[name] for name in ("smoothed", "recomputed", "unclipped")},
}
#: What shards could change: when gradients are exchanged, what is gathered twice, which rows a loss is a mean of.
IN_SHARDS = ("accumulated", "own loss", "tied", "one head of keys", "recomputed")


def test_divided_tokens_have_the_losses_and_weights_of_one_process(tmp_path: Path) -> None:
    expected = several(str(tmp_path / "alone"), DIVIDED_TOKENS)
    groups: dict[int, list[tuple[str, dict[str, int]]]] = {
        2: [(name, {"sequence": 2}) for name in DIVIDED_TOKENS],
        4: [(name, {"shard": 2, "sequence": 2}) for name in IN_SHARDS],
    }
    groups[4] += [("own loss", {"replicate": 2, "sequence": 2}), ("one head of keys", {"sequence": 4})]
    for world, pairs in groups.items():
        cases = {
            f"{name} in {sizes}": {**in_two(sizes), **DIVIDED_TOKENS[name], "layout": sizes} for name, sizes in pairs
        }
        for results in run_distributed(several, world, str(tmp_path / str(world)), cases, timeout_s=180):
            for (name, sizes), one in zip(pairs, results.values(), strict=True):
                close(one, expected[name])
                shards = {"fsdp": "full_shard"} if "shard" in sizes else {}
                assert one["described"] == {"strategy": "sequence", **shards, "layout": sizes}
                here, everywhere = one["bytes"]
                assert here == pytest.approx(everywhere / world if shards else everywhere, rel=0.1)


class FromSources(list[Any]):
    mixture = Mixture({"a": 6, "b": 8}, {}, [Piece(0, {"a": 0.5, "b": 0.5})])


def by_source(folder: str, sizes: dict[str, int] | None) -> list[dict[str, float]]:
    """The logged losses of both sources."""
    rows = [{**row, "source": "a" if place < 6 else "b"} for place, row in enumerate(lm_rows(COUNT, length=7))]
    one = trainer(folder, FromSources(rows), model=llama(**HEADS), **RAGGED, parallelism=sizes)
    one.train()
    return [{name: log[name] for name in ("loss_a", "loss_b")} for log in one.state.log_history if "loss" in log]


def test_divided_tokens_have_the_losses_of_every_source(tmp_path: Path) -> None:
    alone = by_source(str(tmp_path / "alone"), None)
    for found in run_distributed(by_source, 2, str(tmp_path / "divided"), {"sequence": 2}):
        assert [*map(pytest.approx, found)] == alone


def shared_rows(folder: str) -> list[str]:
    """What refuses packed rows, rows padded before their text, and one process alone; tokens that are generated."""
    found = []
    plain = lm_rows(8, ragged=False)
    before = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1])
    packed = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    changes: list[dict[str, Any]] = [{"attention_mask": before}, {"position_ids": packed}]
    for change in [*changes, {"token_type_ids": packed}]:
        one = trainer(folder, [{**row, **change} for row in plain], model=llama(**HEADS), **TOKENS)
        with pytest.raises((DataError, ConfigError)) as caught:
            one.train()
        found.append(str(caught.value))
    one = trainer(folder, plain, model=llama(**HEADS), **TOKENS)
    one.train()
    tokens = one.model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    alone = llama(**HEADS)
    alone.load_state_dict(one.model.state_dict())
    whole = alone.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, do_sample=False)
    assert tokens.tolist() == whole.tolist()
    return found


TOKENS: dict[str, Any] = {**RAGGED, "parallelism": {"sequence": 2}, "remove_unused_columns": False}


def test_rows_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    for messages in run_distributed(shared_rows, 2, str(tmp_path)):
        padded, packed, more = messages
        assert "attention_mask" in padded and 'padding_side="right"' in padded
        assert "position_ids" in packed and "Turn packing off" in packed
        assert "token_type_ids" in more and "input_ids, attention_mask, position_ids and labels" in more


def draws(folder: str) -> tuple[list[float], list[float], float]:
    """Numbers drawn between divided layers, by a layer after them, and after a training."""
    drawn: dict[str, list[float]] = {"inner": [], "outer": []}
    made = Halves()
    for name, seen in drawn.items():
        layer: nn.Module = getattr(made, name)
        layer.register_forward_hook(lambda *_, seen=seen: seen.append(float(torch.rand(()))))
    trainer(folder, ROWS, model=made, **RAGGED, parallelism={"tensor": 2, "shard": 2, "plan": PLAN}).train()
    return drawn["inner"], drawn["outer"], float(torch.rand(()))


def other_samples(folder: str) -> str:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])
    rows = lm_rows(COUNT, seed=int(rank == 3))
    one = trainer(folder, rows, model=llama(**HEADS), **RAGGED, parallelism={"tensor": 2, "shard": 2})
    with pytest.raises(DataError) as caught:
        one.train()
    return str(caught.value)


def drawn_and_read(folder: str) -> tuple[tuple[list[float], list[float], float], str]:
    return draws(f"{folder}/alike"), other_samples(f"{folder}/other")


def test_ranks_of_a_tensor_group_draw_alike_but_between_layers_and_read_the_same_samples(tmp_path: Path) -> None:
    ranks = run_distributed(drawn_and_read, 4, str(tmp_path))
    inner, outer, after = ([drawn[part] for drawn, _ in ranks] for part in range(3))
    assert len({tuple(numbers) for numbers in inner}) == 4
    assert outer[0] == outer[1] != outer[2] == outer[3]
    assert after[0] == after[1] != after[2] == after[3]
    for _, message in ranks:
        assert "shard=1 and tensor=1, shard=1" in message
        assert "ranks 2 and 3" in message


def frozen(model: Any, *parts: str) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(part in name for part in parts)
    return model


#: Of layers and of experts: the model, what a training asks for, and the relative difference that is allowed.
PARTS: dict[str, dict[str, tuple[Callable[[], Any], dict[str, Any], float]]] = {
    "tensor": {
        "bf16": (lambda: llama(**HEADS), {"bf16": True}, 0.02),
        "clipped": (lambda: llama(**HEADS), {"max_grad_norm": 0.1}, 2e-6),
        "frozen": (lambda: frozen(llama(**HEADS), "mlp", "embed"), {}, 2e-6),
        "frozen norms": (lambda: frozen(llama(**HEADS), "norm"), {}, 2e-6),
    },
    "expert": {
        "bf16": (mixture, {"bf16": True}, 0.02),
        "clipped": (mixture, {"max_grad_norm": 0.1}, 2e-6),
        "experts alone": (lambda: frozen(mixture(), "self_attn", "norm", "embed", "lm_head", "gate.weight"), {}, 2e-6),
    },
}


#: Left out in shards, where "frozen" and "bf16" of layers show the same.
ALIKE_IN_SHARDS = {("tensor", "frozen norms"), ("expert", "bf16")}


def generating(folder: str, world: int) -> dict[tuple[str, str], tuple[list[float], list[list[int]]]]:
    """Losses and norms of trainings, and the tokens that the model generates afterwards."""
    out = {}
    for kind, name in ((kind, name) for kind, parts in PARTS.items() for name in parts):
        if world == 4 and (kind, name) in ALIKE_IN_SHARDS:
            continue
        model, given, _ = PARTS[kind][name]
        sizes = {1: None, 2: {kind: 2}, 4: {"shard": 2, kind: 2}}[world]
        one = trainer(f"{folder}/{kind} {name}", ROWS, model=model(), **{**RAGGED, **given}, parallelism=sizes)
        one.train()
        made = one.model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, do_sample=False)  # type: ignore[operator]
        out[kind, name] = [*losses(one), *norms(one)], made.tolist()
    return out


def test_divided_parts_generate_and_train_in_bf16_clipped_and_frozen(tmp_path: Path) -> None:
    expected = generating(str(tmp_path / "alone"), 1)
    for world in (2, 4):
        for found in run_distributed(generating, world, str(tmp_path / str(world)), world, timeout_s=180):
            assert len(found) == len(expected) - (len(ALIKE_IN_SHARDS) if world == 4 else 0)
            for (kind, name), (trained, made) in found.items():
                assert trained == pytest.approx(expected[kind, name][0], rel=PARTS[kind][name][2]), (kind, name)
                assert made == expected[kind, name][1], (kind, name)


#: The model, of which some answers end before others, what divides it, and whether ranks may have other prompts.
ANSWERED: dict[str, tuple[Callable[[], Any], dict[str, Any], bool]] = {
    "sent": (lambda: mixture(eos_token_id=[*range(5, 12)]), {"parallelism": {"expert": 2}}, True),
    "encoder": (seq2seq.t5, {"fsdp": "full_shard auto_wrap"}, True),
    "tensor": (lambda: llama(**HEADS, eos_token_id=[18, 19]), {"parallelism": {"tensor": 2}}, False),
    "zero": (lambda: llama(**HEADS, eos_token_id=[18, 19]), {"deepspeed": {"zero_optimization": {"stage": 3}}}, False),
}


def every_answer(folder: str, is_divided: bool, *names: str) -> dict[str, tuple[float, Any, list[int]]]:
    return {name: answers(f"{folder}/{name}", name, is_divided) for name in names}


def answers(folder: str, name: str, is_divided: bool) -> tuple[float, Any, list[int]]:
    """The loss and the answers of evaluations, then a rank's answer to a prompt."""
    model, given, differ = ANSWERED[name]
    rows: list[Any] = seq2seq.rows(7) if name == "encoder" else lm_rows(7, seed=3, ragged=False)
    collate = {} if name == "encoder" else {"data_collator": default_data_collator}
    given = {**collate, **(given if is_divided else {}), "generation_max_length": 20}
    one = seq2seq.seq2seq_trainer(folder, model(), eval_dataset=rows, **given)
    loss, without = one.evaluate()["eval_loss"], [{"input_ids": row["input_ids"]} for row in rows]
    prompt = rows[torch.distributed.get_rank() if is_divided and differ else 0]["input_ids"]
    predicted = one.predict(without).predictions
    return loss, predicted, one.model.generate(torch.as_tensor(prompt)[None], max_length=20, num_beams=1)[0].tolist()


def check_answers(folder: Path, *names: str) -> None:
    alone = every_answer(str(folder / "alone"), False, *names)
    ranks = run_distributed(every_answer, 2, str(folder / "ranks"), True, *names)
    for name, (loss, expected, _) in alone.items():
        assert ranks[0][name][1].tolist() == expected.tolist(), name
        for rank, (measured, _, answer) in enumerate(each[name] for each in ranks):
            assert measured == pytest.approx(loss, rel=2e-6), name
            row = expected[rank if ANSWERED[name][2] else 0].tolist()
            assert answer == row[: len(answer)] and set(row[len(answer) :]) <= {0}, name


def test_answers_end_at_other_tokens_on_other_ranks(tmp_path: Path) -> None:
    check_answers(tmp_path, "sent", "encoder", "tensor")  # "zero" is where DeepSpeed is imported anyway


UNDIVIDED = [
    "The 2 heads (num_attention_heads) cannot be divided among 4 processes.",
    "The model Halves computes an attention that cannot be replaced",
    "BertForSequenceClassification is not a causal language model",
    "Qwen3ForCausalLM has layers with another attention",
]


def refused(folder: str) -> list[str]:
    found = []
    for model, given in (
        (llama(), {"parallelism": {"sequence": 4}}),
        (Halves(), {"parallelism": {"sequence": 4}}),
        (bert(), {"parallelism": {"sequence": 4}}),
        (qwen(layer_types=["full_attention", "chunked_attention"]), {"parallelism": {"sequence": 4}}),
        (llama(), {"parallelism": {"tensor": 4}}),
        (Halves(), {"parallelism": {"tensor": 4}}),
        (llama(**HEADS), {"parallelism": {"tensor": 2}}),
        (llama(**HEADS), {"parallelism": {"expert": 4}}),
        (mixture(num_local_experts=6), {"parallelism": {"expert": 4}}),
    ):
        with pytest.raises(ConfigError) as caught:
            trainer(folder, ROWS, model=model, **given)  # type: ignore[arg-type]
        found.append(str(caught.value))
    return found


def test_what_a_model_cannot_be_divided_into_is_refused(tmp_path: Path) -> None:
    for messages in run_distributed(refused, 4, str(tmp_path)):
        heads, plan, product, none, experts = messages[4:]
        for message, part in zip(messages, UNDIVIDED, strict=False):
            assert part in message
        assert "2 heads (num_attention_heads) cannot be divided among 4 processes. Give 2." in heads
        assert "Halves does not say how its layers can be divided" in plan
        assert "Its product is 2, and there are 4 processes." in product
        assert "parallelism.expert = 4: The model LlamaForCausalLM has no experts that can be divided" in none
        assert "parallelism.expert = 4: The model's 6 experts cannot be divided among 4 processes. Give 3." in experts
