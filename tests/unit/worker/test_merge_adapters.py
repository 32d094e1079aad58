"""Adapters are merged into the weights of their base model; a model that could not be registered is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import tiny
from tests.support.launched import request
from tests.support.tiny_models import bert, llama
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.protocol.requests import MergeRequest, PreparedData, RecipeFile
from trainer_lib.recipes.shared.model_places import load_causal_model, quantized
from trainer_lib.storage import Store
from trainer_lib.worker.merge_adapters import compare, merge, require_mergeable
from trainer_lib.worker.process.assembly import load_weights
from trainer_lib.worker.train import require_flavor

# peft asks transformers by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOKENS = torch.arange(3, 19).view(2, 8)
RECIPE = """
from peft import LoraConfig, get_peft_model
from tests.support.tiny_models import llama, lm_rows


def prepare(options, out):
    held_out = ({"input_ids": row["input_ids"].tolist()} for row in lm_rows(24))
    return {"train": [{"input_ids": [3]}], "test": held_out}


def build_model(options, data):
    model = llama()
    return model if options.get("whole") else get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
"""


def adapted(base: Any, *, seed: int = 3, **given: Any) -> Any:
    """A model with adapters as after a training: none of their weights is zero."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base, LoraConfig(**{"r": 2, "task_type": "CAUSAL_LM", **given}))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn_like(weight) if "lora_" in name else weight + 0.1)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    """What a model makes of `TOKENS`, `[batch, tokens, vocabulary]` or `[batch, classes]`."""
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)).logits
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: adapted(llama(), target_modules="all-linear"),
        lambda: adapted(llama(), target_modules=["q_proj"], use_rslora=True, lora_alpha=3),
        lambda: adapted(llama(), target_modules=["v_proj"], use_dora=True),
        # Its head is trained as a whole.
        lambda: adapted(bert(), target_modules=["query", "value"], task_type="SEQ_CLS"),
        lambda: adapted(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ],
)
def test_merged_weights_give_what_the_adapters_give(make: Any) -> None:
    model = make()
    with model.disable_adapter():
        base = logits(model)
    expected = logits(model)
    assert not torch.allclose(base, expected, atol=1e-2), "the adapters do nothing, so nothing would be tested"
    require_mergeable(model)
    merged = merge(model)
    assert not any("lora" in name for name in merged.state_dict())
    assert torch.allclose(logits(merged), expected, rtol=1e-4, atol=1e-4)


def _request(folder: Path, recipe: str = RECIPE, **fields: Any) -> MergeRequest:
    (folder / "recipe.py").write_text(recipe)
    return MergeRequest(
        output=str(folder / "out"),
        recipe=RecipeFile(str(folder / "recipe.py"), str(folder)),
        data=PreparedData("", {}, {}, ()),
        model_url=str(folder / "model"),
        args={"use_cpu": True},
        **fields,
    )


def test_what_the_worker_writes_loads_by_from_pretrained_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = adapted(llama())
    model.save_pretrained(tmp_path / "model")
    result = tiny.run(_request(tmp_path), kind="in_process")
    assert {"model.safetensors", "config.json"} <= {entry.path for entry in result.files}
    assert not any("adapter" in entry.path for entry in result.files)
    for entry in result.files:
        assert Store.open(tmp_path / "out").digest(entry.path) == entry.sha256
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)
    # Adapters beside merged weights are found.
    (tmp_path / "published").mkdir()
    (tmp_path / "model").rename(tmp_path / "published" / "adapter")
    other = adapted(llama(), seed=9)
    load_weights(other, str(tmp_path / "published"))
    assert torch.equal(logits(other), logits(model))


def test_a_model_without_adapters_and_adapters_of_another_are_refused(tmp_path: Path) -> None:
    adapted(llama()).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="LlamaForCausalLM, which has no adapters") as caught:
        tiny.run(_request(tmp_path, model={"whole": True}), kind="in_process")
    assert caught.value.field == "publish.merge_adapters"
    with pytest.raises(DamagedError, match="adapter"):
        tiny.run(_request(tmp_path, RECIPE.replace("r=2", "r=16")), kind="in_process")


@pytest.mark.needs("bitsandbytes")
@pytest.mark.parametrize("load_in", ["4bit", "8bit"])
@pytest.mark.parametrize("given", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}])
def test_adapters_on_few_bits_are_merged_into_the_values_that_these_stand_for(
    tmp_path: Path, load_in: str, given: dict[str, Any]
) -> None:
    llama(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    settings = quantized(load_in, place=str(tmp_path), adapted=True)
    base = load_causal_model(str(tmp_path), dtype="float32", vocabulary=32, field="model", settings=settings)
    model = adapted(base, target_modules="all-linear", **given)
    expected = logits(model)
    require_mergeable(model)
    merged = merge(model, dtype="float32")
    found = compare([expected[0]], [logits(merged)[0]])
    assert not any("lora" in name or "absmax" in name or "SCB" in name for name in merged.state_dict())
    assert not hasattr(merged.config, "quantization_config")
    assert found["merge_difference"] < (1e-3 if load_in == "4bit" else 0.02) * expected.abs().max()


@pytest.mark.needs("bitsandbytes")
def test_merged_weights_of_few_bits_are_bfloat16_unless_another_type_is_asked_for(tmp_path: Path) -> None:
    llama(hidden_size=64).save_pretrained(tmp_path)
    settings = quantized("4bit", place=str(tmp_path), adapted=True)
    for asked, wanted in ((None, torch.bfloat16), ("float16", torch.float16)):
        base = load_causal_model(str(tmp_path), dtype="float32", vocabulary=32, field="model", settings=settings)
        assert {each.dtype for each in merge(adapted(base), dtype=asked).parameters()} == {wanted}


def test_merged_weights_that_answer_in_another_way_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """The rows are those of the prepared data; half of the next tokens are others after a fault in merging."""
    prepared = tiny.prepare(request(tmp_path, RECIPE, output=str(tmp_path / "data")))
    adapted(llama()).save_pretrained(tmp_path / "model")
    result = tiny.run(replace(_request(tmp_path), data=prepared, tolerance=0.0), kind="in_process")
    assert result.agreement["merge_agreement"] == 1
    assert result.agreement["merge_prompts"] == 20
    assert 0 < result.agreement["merge_difference"] < 1e-3

    def spoilt(model: Any, dtype: str | None) -> nn.Module:
        merged = merge(model, dtype=dtype)
        with torch.no_grad():
            for weight in merged.parameters():
                weight.add_(torch.randn_like(weight))
        return merged

    monkeypatch.setattr("trainer_lib.worker.merge_adapters.merge", spoilt)
    with pytest.raises(
        ConfigError, match=r"merge_tolerance = 0\.1: Merged weights choose .* % of the places"
    ) as caught:
        tiny.run(replace(_request(tmp_path), data=prepared, tolerance=0.1), kind="in_process")
    assert "publish.merged_type=float32" in str(caught.value.remedy)
    tiny.run(replace(_request(tmp_path), data=prepared, tolerance=1.0), kind="in_process")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_adapters_that_cannot_be_merged_are_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = adapted(llama(tie_word_embeddings=True), target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(ConfigError, match="embed_tokens, a weight that another layer shares"):
        require_mergeable(model)
    model = adapted(llama(tie_word_embeddings=True), target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match="lm_head, a weight that another layer shares"):
        require_mergeable(model)
    model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match=r"PROMPT_TUNING are not part of the weights.*published alone"):
        require_mergeable(model)
    model = adapted(llama())
    with torch.no_grad():
        next(weight for name, weight in model.named_parameters() if "lora_B" in name).fill_(float("nan"))
    with pytest.raises(ConfigError, match="peft cannot merge the adapters"):
        merge(model)


def test_a_model_of_transformers_passes_and_others_only_where_nothing_is_required() -> None:
    require_flavor(bert(), "transformers")
    require_flavor(torch.nn.Linear(1, 1), None)
    with pytest.raises(ConfigError, match=r"returned a Linear, which is not a model of transformers"):
        require_flavor(torch.nn.Linear(1, 1), "transformers")
    with pytest.raises(ConfigError, match="which is an adapter"):
        require_flavor(adapted(bert(), target_modules=["query"], task_type="SEQ_CLS"), "transformers")
