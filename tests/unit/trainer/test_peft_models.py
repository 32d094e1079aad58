"""Models with peft adapters: only these are trained, saved and put back, and nothing else is needed to go on."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiny_models import bert, llama, lm_rows
from tests.support.training import Note, trained, trainer
from trainer_lib.errors import ConfigError

ROWS = lm_rows(16)
SAVED: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
# peft asks transformers by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def peft() -> Any:
    return importlib.import_module("peft")  # seconds: not for every worker that collects this file


def lora(*, seed: int = 0, base: Any = None, **given: Any) -> Any:
    """A tiny decoder with LoRA on its queries and values, and dropout in it."""
    model = llama() if base is None else base
    torch.manual_seed(seed)
    settings = {"r": 2, "lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **given}
    return peft().get_peft_model(model, peft().LoraConfig(**settings))


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_only_the_adapters_are_trained(tmp_path: Path) -> None:
    model = lora()
    base = {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}
    before = adapters(model)
    one = trained(tmp_path, ROWS, model=model, max_steps=2)
    assert one.optimizer is not None
    held = [id(each) for group in one.optimizer.param_groups for each in group["params"]]
    assert sorted(held) == sorted(id(p) for name, p in model.named_parameters() if "lora_" in name)
    assert one.get_num_trainable_parameters() == sum(value.numel() for value in before.values())
    assert_same(base, {name: value for name, value in model.state_dict().items() if "lora_" not in name})
    assert not any(torch.equal(value, before[name]) for name, value in adapters(model).items() if "lora_B" in name)


def test_save_model_and_checkpoints_hold_the_adapter_that_peft_loads_and_not_the_base(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = lora()
    trained(tmp_path, ROWS, model=model, **SAVED).save_model(str(tmp_path / "model"))
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "training_args.json"}
    assert load_file(tmp_path / "checkpoint-2" / "model.safetensors").keys() == adapters(model).keys()
    for folder in ("model", "checkpoint-2"):
        assert_same(adapters(peft().PeftModel.from_pretrained(llama(), tmp_path / folder)), adapters(model))


def test_several_adapters_go_to_folders_of_their_own(tmp_path: Path) -> None:
    model = lora()
    model.add_adapter("second", peft().LoraConfig(r=3, target_modules=["o_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("second")
    trainer(tmp_path, ROWS, model=model, **SAVED).train()
    checkpoint = tmp_path / "checkpoint-2"
    for folder, rank in ((checkpoint, 2), (checkpoint / "second", 3)):
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == rank
    loaded = peft().PeftModel.from_pretrained(llama(), checkpoint)
    loaded.load_adapter(checkpoint / "second", "second")
    assert_same(adapters(loaded), adapters(model))


def test_adapters_are_not_put_on_another_base(tmp_path: Path) -> None:
    trainer(tmp_path, ROWS, model=lora(), **SAVED).train()
    other = trainer(tmp_path, ROWS, model=lora(base=llama(seed=1)), **{**SAVED, "max_steps": 4})
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint = .*checkpoint-2: .*other base weights"):
        other.train(resume_from_checkpoint=True)


def test_the_best_adapter_is_put_back_at_the_end(tmp_path: Path) -> None:
    def spoil(state: Any, model: nn.Module, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            if state.global_step == 2 and "lora_" in name:
                parameter.data.add_(3.0)

    measured = Note("on_evaluate", lambda state, model, **_: adapters(model))
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    given |= {"load_best_model_at_end": True, "max_steps": 3, "eval_dataset": ROWS}
    model = lora()
    one = trained(tmp_path, ROWS, model=model, callbacks=[measured, Note("on_step_begin", spoil)], **given)
    assert one.state.best_global_step == 2
    assert_same(adapters(model), measured.kept[1])


def test_adapters_added_to_a_model_itself_are_saved_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 5.24 asks for peft 0.22, which is not published; the check is all that stops an older one.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18.0")
    model = llama()
    torch.manual_seed(0)
    model.add_adapter(peft().LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    trained(tmp_path / "run", ROWS, model=model, **SAVED).save_model(str(tmp_path / "model"))
    for folder in (tmp_path / "model", tmp_path / "run" / "checkpoint-2"):
        loaded = llama()
        loaded.load_adapter(str(folder))
        assert_same(adapters(loaded), adapters(model))


def test_labels_columns_and_the_count_are_those_of_the_model_inside(tmp_path: Path) -> None:
    inside = bert(cls="BertForQuestionAnswering", num_labels=2)
    one = trainer(tmp_path, None, model=peft().get_peft_model(inside, peft().LoraConfig(target_modules=["query"])))
    assert one.label_names == ["start_positions", "end_positions"]
    assert "token_type_ids" in (one._trainflow.facts.columns or ())


def test_gradient_checkpointing_lets_gradients_reach_the_adapters(tmp_path: Path) -> None:
    model = lora()
    before = adapters(model)
    calls: list[int] = []
    model.base_model.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    kwargs = {"use_reentrant": True}  # the other way needs nothing of the embeddings
    settings: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    trainer(tmp_path, ROWS, model=model, max_steps=1, **settings).train()
    assert len(calls) == 2
    assert not any(torch.equal(value, before[name]) for name, value in adapters(model).items() if "lora_B" in name)


def test_neftune_finds_the_embedding_under_the_adapters(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model_init": lora, "max_steps": 1}
    losses = [trainer(tmp_path, ROWS, neftune_noise_alpha=noise, **given).train() for noise in (None, 50.0)]
    assert losses[0].training_loss != losses[1].training_loss


def test_quantised_weights_are_trained_where_they_are_but_not_without_adapters(tmp_path: Path) -> None:
    model = llama()
    model.is_quantized, model.quantization_method = True, "bitsandbytes"
    with pytest.raises(ConfigError, match=r"model = LlamaForCausalLM: The model is quantised, .*get_peft_model"):
        trainer(tmp_path, None, model=model)
    moved: list[Any] = []
    adapted = lora(base=model, target_modules=["q_proj"])
    adapted.to = lambda *args, **kwargs: moved.append(args)
    one = trainer(tmp_path, ROWS, model=adapted, max_steps=1)
    assert one.place_model_on_device is False
    one.train()
    one.evaluate(ROWS)
    assert moved == []


@pytest.mark.parametrize(
    ("devices", "parallel", "placed"),
    [
        ({"model.embed_tokens": 0, "model.layers": 1}, True, False),
        ({"model.layers.0": "cpu", "lm_head": "disk"}, False, False),
        ({"": "cpu"}, False, None),
    ],
)
def test_a_model_on_several_devices_stays(devices: Any, parallel: bool, placed: bool | None, tmp_path: Path) -> None:
    model = llama()
    model.hf_device_map = devices
    one = trainer(tmp_path, ROWS, model=model)
    assert one.is_model_parallel is parallel
    assert placed is None or one.place_model_on_device is placed


def test_a_prompt_is_trained_and_resumed(tmp_path: Path) -> None:
    def made(seed: int) -> Any:
        model = llama()
        torch.manual_seed(seed)
        return peft().get_peft_model(model, peft().PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))

    logging.getLogger("peft").setLevel(logging.ERROR)
    given: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trained(tmp_path, ROWS, model=made(0), **given)
    again = trainer(tmp_path / "again", ROWS, model=made(1), **given)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(
        whole.model.prompt_encoder["default"].embedding.weight,  # type: ignore[index,union-attr]
        again.model.prompt_encoder["default"].embedding.weight,  # type: ignore[index,union-attr]
    )


# peft below 0.22 passes prefixes to transformers 5.24 by their old name.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig", "LoraConfig"])
def test_trained_tokens_before_the_rows_do_not_change_the_scale_of_the_loss(kind: str, tmp_path: Path) -> None:
    """Of a row of five tokens, six would have been counted in the loss and five in its weight, or the other way."""
    logging.getLogger("peft").setLevel(logging.ERROR)
    torch.manual_seed(0)
    settings: dict[str, Any] = {"r": 2} if kind == "LoraConfig" else {"num_virtual_tokens": 3}
    model = peft().get_peft_model(llama(), getattr(peft(), kind)(task_type="CAUSAL_LM", **settings))
    rows = [*lm_rows(4, ragged=False), *lm_rows(4)]
    given: dict[str, Any] = {"learning_rate": 0.0, "logging_steps": 1, "logging_strategy": "steps", "max_steps": 1}
    one = trainer(tmp_path, rows, model=model, global_batch_size=8, **given)
    loss = one.train().metrics["train_loss"]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        assert loss == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-5)
    assert one.evaluate(rows)["eval_loss"] == pytest.approx(loss, rel=1e-5)
