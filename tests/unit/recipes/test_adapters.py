"""Adapters by one key, on weights of any type and of 4 or 8 bits: their forms, refusals, training and exact resume."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.named_recipes import Prepared, RecipeCase, prove_resume, refusal, save_base, trainer_of
from trainer_lib.arguments import TrainingArguments
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.recipes.shared.model_places import add_adapters
from trainer_lib.trainer.model import models
from trainer_lib.worker.process.assembly import BASE, load_weights
from trainflow.flows.new_project.starting import read_sample

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
CHATS = RecipeCase(
    "supervised-fine-tuning",
    "chats.jsonl",
    {"vocabulary": 300, "length": 96, "overlong": "cut", "split": {"validation": 0, "test": 0.25}},
)
PAIRS = RecipeCase(
    "preference-optimization", "pairs.jsonl", {"max_length": 96, "split": {"validation": 0, "test": 0.25}}
)
BATCHES: dict[str, Any] = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "eval_strategy": "no"}
quantized = pytest.mark.needs("bitsandbytes")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    rows = [{"prompt": f"count from {n}", "completion": f"{n} {n + 1} {n + 2} {n + 3}"} for n in range(60)]
    return CHATS.prepare(tmp_path_factory.mktemp("chats"), "".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def base(chats: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(chats, tmp_path_factory.mktemp("base"))


def build(made: Prepared, **options: Any) -> Any:
    torch.manual_seed(1)
    return made[0].build_model(options, made[2])


# -- one key ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("adapter", "form", "scale"),
    [
        ({"kind": "lora"}, {"r": 16, "lora_alpha": 32, "use_dora": False, "use_rslora": False}, 2.0),
        ({"rank": 4, "alpha": 2, "dropout": 0.25}, {"r": 4, "lora_alpha": 2, "lora_dropout": 0.25}, 0.5),
        ({"kind": "dora", "rank": 2}, {"use_dora": True, "use_rslora": False}, 2.0),
        ({"kind": "rslora", "rank": 4}, {"use_dora": False, "use_rslora": True, "lora_alpha": 16}, 8.0),
    ],
)
def test_an_adapter_is_that_of_peft(
    chats: Prepared, base: Path, adapter: dict[str, Any], form: dict[str, Any], scale: float
) -> None:
    model = build(chats, folder=base, adapter=adapter)
    config = model.peft_config["default"]
    assert {name: getattr(config, name) for name in form} == form
    scales = [getattr(layer, "scaling", None) for layer in model.modules()]
    assert {each["default"] for each in scales if isinstance(each, dict)} == {scale}
    assert all("lora" in name for name, weight in model.named_parameters() if weight.requires_grad)
    changed = {name.split(".")[-4] for name, weight in model.named_parameters() if "lora_A" in name}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"adapter": {"kind": "qlora"}}, "adapter.kind", 'Did you mean "lora"'),
        ({"adapter": {"r": 8}}, "adapter.r", "no such option"),
        ({"adapter": {"rank": 0}}, "adapter.rank", "from 1 on"),
        ({"adapter": {"rank": 2.5}}, "adapter.rank", "a whole number"),
        ({"adapter": {"rank": True}}, "adapter.rank", "a whole number"),
        ({"adapter": {"alpha": -1}}, "adapter.alpha", "above 0"),
        ({"adapter": {"alpha": "x"}}, "adapter.alpha", "above 0"),
        ({"adapter": {"alpha": float("nan")}}, "adapter.alpha", "above 0"),
        ({"adapter": {"dropout": 1}}, "adapter.dropout", "below 1"),
        ({"adapter": {"targets": []}}, "adapter.targets", "all-linear, or a list"),
        ({"adapter": {"targets": "q_proj"}}, "adapter.targets", "all-linear, or a list"),
        ({"adapter": {"targets": ["q_proj", "qproj"]}}, "adapter.targets", 'no such layer … Did you mean "q_proj"'),
        ({"adapter": {"targets": ["q_proj"], "modules_to_save": ["head"]}}, "adapter.modules_to_save", "no such layer"),
        ({"adapter": {"targets": ["norm"]}}, "adapter", "peft cannot add the adapters … Name layers"),
        ({"load_in": "4bit"}, "load_in", "trained by adapters alone … Add train.model.adapter"),
        ({"load_in": "2bit", "adapter": {"rank": 2}}, "load_in", "one of the choices"),
    ],
)
def test_what_has_no_sense_is_refused_before_training(
    chats: Prepared, base: Path, options: dict[str, Any], field: str, words: str
) -> None:
    error = refusal(lambda: build(chats, folder=base, **options))
    assert error.field == f"train.model.{field}"
    assert all(part in str(error) for part in words.split(" … ")), error


def test_a_model_at_random_takes_no_adapters_and_loads_nothing(chats: Prepared) -> None:
    assert "has been trained" in str(refusal(lambda: build(chats, adapter={"rank": 2})))
    assert "loads no weights" in str(refusal(lambda: build(chats, load_in="4bit", adapter={"rank": 2})))


@pytest.mark.parametrize("name", ["targets", "modules_to_save"])
def test_a_weight_that_two_layers_share_is_not_trained_in_either(chats: Prepared, tmp_path: Path, name: str) -> None:
    tied = save_base(chats, tmp_path, tie_word_embeddings=True)
    error = refusal(lambda: build(chats, folder=tied, adapter={"rank": 2, name: ["lm_head"]}))
    assert (error.field, error.value) == (f"train.model.adapter.{name}", "lm_head")
    assert "shares its weight" in error.message
    build(chats, folder=tied, adapter={"rank": 2})


# -- few bits ---------------------------------------------------------------------------------------------------------
@quantized
@pytest.mark.parametrize(("load_in", "kind"), [("4bit", "lora"), ("4bit", "dora"), ("8bit", "rslora")])
def test_weights_in_few_bits_stay_while_adapters_train_through_an_evaluation(
    chats: Prepared, base: Path, tmp_path: Path, load_in: str, kind: str
) -> None:
    recipe, splits, data = chats
    model = build(chats, folder=base, load_in=load_in, adapter={"kind": kind, "rank": 4})
    before = models.frozen_fingerprint(model, model.state_dict())
    trainer = trainer_of(recipe, data, model, tmp_path, splits["train"], 8, save_strategy="steps", save_steps=4)
    first = trainer.evaluate(eval_dataset=splits["test"])["eval_loss"]
    trainer.args.learning_rate = 1e-2
    trainer.train()
    assert trainer.evaluate(eval_dataset=splits["test"])["eval_loss"] < first - 0.1
    assert models.frozen_fingerprint(model, model.state_dict()) == before
    from safetensors.torch import load_file

    kept = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert kept and all("lora_" in name for name in kept)


@quantized
def test_4_bit_weights_multiply_in_the_type_of_the_arguments(chats: Prepared, base: Path, tmp_path: Path) -> None:
    model = build(chats, folder=base, load_in="4bit", adapter={"rank": 2})
    layer = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert layer.weight.quant_state.nested
    assert layer.weight.quant_state.quant_type == "nf4"
    plain = build(chats, folder=base, adapter={"rank": 2})
    counts = [sum(map(models.numbers_in, each.parameters())) for each in (model, plain)]
    assert counts[0] == counts[1] == plain.num_parameters()
    for bf16, wanted in ((False, torch.float32), (True, torch.bfloat16)):
        models.set_compute_type(model, TrainingArguments(str(tmp_path), use_cpu=True, bf16=bf16))
        assert layer.compute_dtype == wanted


@quantized
def test_dora_does_not_train_on_8_bits(chats: Prepared, base: Path) -> None:
    error = refusal(lambda: build(chats, folder=base, load_in="8bit", adapter={"kind": "dora"}))
    assert error.field == "train.model.adapter.kind"


@quantized
@pytest.mark.parametrize("load_in", ["4bit", "8bit"])
def test_a_run_on_few_bits_that_goes_on_ends_like_one_that_was_not_stopped(
    chats: Prepared, base: Path, tmp_path: Path, load_in: str
) -> None:
    model = {"folder": base, "load_in": load_in, "adapter": {"rank": 2, "dropout": 0.2}}
    given = {**BATCHES, "eval_strategy": "steps", "eval_steps": 2, "held_out": chats[1]["test"]}
    prove_resume(chats, tmp_path, model, **given)


@quantized
def test_another_base_is_refused_at_the_resume(chats: Prepared, base: Path, tmp_path: Path) -> None:
    recipe, splits, data = chats
    for number, folder in enumerate((base, save_base(chats, tmp_path / "other", seed=7))):
        model = build(chats, folder=folder, load_in="4bit", adapter={"rank": 2})
        steps = {"save_strategy": "steps", "save_steps": 2, **BATCHES}
        trainer = trainer_of(recipe, data, model, tmp_path / "run", splits["train"], 2 + 2 * number, **steps)
        if number == 0:
            trainer.train()
        else:
            with pytest.raises(ConfigError, match="other base weights"):
                trainer.train(resume_from_checkpoint=True)


@quantized
def test_preferences_begin_with_the_reference_in_the_same_bits(base: Path, chats: Prepared, tmp_path: Path) -> None:
    rows = "".join([line for line in read_sample("word_orders.jsonl").splitlines(True) if len(line) < 250][:24])
    made = PAIRS.prepare(tmp_path, rows, folder=base, load_in="4bit")
    error = refusal(lambda: build(made, folder=base, adapter={"rank": 2}, load_in="4bit"))
    assert (error.field, error.remedy) == ("train.model.load_in", "Move it to prepare.options.load_in.")
    assert "adapters alone" in str(refusal(lambda: build(made, folder=base)))
    model = build(made, folder=base, adapter={"rank": 2})
    assert model.get_base_model().is_loaded_in_4bit
    trainer_of(made[0], made[2], model, tmp_path / "run", made[1]["train"], 2, **BATCHES).train()
    assert add_adapters(model, {}, place=None) is model


# -- exported ---------------------------------------------------------------------------------------------------------
def test_exported_adapters_name_their_base_and_are_not_put_on_another(
    chats: Prepared, base: Path, tmp_path: Path
) -> None:
    described = models.describe_base(build(chats, folder=base, adapter={"rank": 2}))
    digest = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    assert described == {"name": base.name, "revision": None, "files": {"model.safetensors": digest}}
    assert models.describe_base(build(chats, folder=base)) is None
    model = build(chats, folder=base, adapter={"rank": 2})
    names = json.loads(models.model_files(model, model.state_dict())["adapter_config.json"])["target_modules"]
    assert names == sorted(names)  # a set of peft's, whose order is another one in each process
    assert len(names) == 7
    build(chats, folder=base, adapter={"rank": 2}).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / BASE).write_text(json.dumps(described))
    load_weights(build(chats, folder=base, adapter={"rank": 2}), str(tmp_path / "model"))
    other = save_base(chats, tmp_path / "other", seed=7)
    with pytest.raises(DamagedError, match=f"other weights of {base.name}") as caught:
        load_weights(build(chats, folder=other, adapter={"rank": 2}), str(tmp_path / "model"))
    assert "--force train" in str(caught.value.remedy)
