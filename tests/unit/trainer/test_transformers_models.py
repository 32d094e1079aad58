"""Models of transformers: saved so that `from_pretrained` loads them, resumed bit for bit, and given what they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch import nn

from tests.support.tiny_models import bert, llama, lm_rows, text_rows, tokenizer
from tests.support.training import trainer
from trainer_lib import TrainerCallback
from trainer_lib.errors import ConfigError, MissingExtraError

ROWS = lm_rows(16)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


# -- saving ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [True, False])
def test_save_model_and_checkpoints_write_what_from_pretrained_loads(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = llama(tie_word_embeddings=tied)
    model.generation_config.max_new_tokens = 5
    given: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    one = trainer(tmp_path, ROWS, model=model, processing_class=tokenizer(), **given)
    one.train()
    one.save_model(str(tmp_path / "model"))
    for folder in ("model", "checkpoint-2"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert same_weights(loaded, model)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert loaded.generation_config.max_new_tokens == 5
        assert loaded.config.architectures == ["LlamaForCausalLM"]
        assert loaded.config.use_cache is True
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("cat sat")["input_ids"] == [5, 7]


def test_models_and_checkpoints_go_to_any_store(tmp_path: Path) -> None:
    from safetensors.torch import load

    model = llama(tie_word_embeddings=True)
    one = trainer("memory://models/run", ROWS, model=model, max_steps=1, save_strategy="steps", save_steps=1)
    one.train()
    one.save_model("memory://models/final")
    store = fsspec.filesystem("memory")
    try:
        for folder in ("/models/final", "/models/run/checkpoint-1"):
            names = {path.rsplit("/", 1)[-1] for path in store.ls(folder, detail=False)}
            assert {"config.json", "generation_config.json", "model.safetensors"} <= names
            assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
            weights = load(store.cat(f"{folder}/model.safetensors"))
            assert torch.equal(weights["model.embed_tokens.weight"], model.lm_head.weight)
            assert "lm_head.weight" not in weights
    finally:
        store.rm("/models", recursive=True)


def test_the_collators_tokenizer_is_saved_when_no_processing_class_is_given(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    one = trainer(tmp_path, ROWS, model=llama(), data_collator=collator)
    one.save_model()
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == "[PAD]"


def test_a_model_with_code_of_its_own_takes_it_along(tmp_path: Path) -> None:
    from tests.support.own_model import OwnConfig, OwnModel

    OwnConfig.register_for_auto_class()  # type: ignore[no-untyped-call]
    OwnModel.register_for_auto_class("AutoModel")  # type: ignore[no-untyped-call]
    try:
        trainer(tmp_path, ROWS, model=OwnModel(OwnConfig())).save_model()
    finally:
        OwnConfig._auto_class = OwnModel._auto_class = None
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoModel"] == "own_model.OwnModel"
    assert "class OwnModel" in (tmp_path / "own_model.py").read_text()


# -- resuming, best ----------------------------------------------------------------------------------------------------


# -- what a model is given ---------------------------------------------------------------------------------------------
def test_keys_and_values_are_not_kept_while_training_unless_asked_for(tmp_path: Path) -> None:
    class Looking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append(model.config.use_cache)

    for asked in (False, True):
        seen: list[bool] = []
        model = llama()
        trainer(tmp_path, ROWS, model=model, max_steps=1, callbacks=[Looking()], use_cache=asked).train()
        assert seen == [asked]
        assert model.config.use_cache is True


def test_predictions_leave_out_what_the_configuration_says(tmp_path: Path) -> None:
    model = llama()
    assert "past_key_values" in model.config.keys_to_ignore_at_inference
    output = trainer(tmp_path, ROWS, model=model).predict(ROWS)
    assert isinstance(output.predictions, np.ndarray)
    assert output.predictions.shape == (16, 8, 32)


def test_question_answering_has_two_labels(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "start_positions": 1, "end_positions": 3} for row in text_rows(8)]
    one = trainer(tmp_path, rows, model=bert(cls="BertForQuestionAnswering", num_labels=2), max_steps=2)
    assert one.label_names == ["start_positions", "end_positions"]
    one.train()
    output = one.predict(rows)
    assert [part.shape for part in output.predictions] == [(8, 8), (8, 8)]
    assert [part.tolist() for part in output.label_ids] == [[1] * 8, [3] * 8]
    assert output.metrics is not None
    assert output.metrics["test_loss"] > 0


class Contrastive(nn.Module):
    """Has no labels, and computes its loss unless told not to, as contrastive models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"loss": out.square().mean(), "embeds": out} if return_loss else {"embeds": out}


def test_a_model_that_returns_its_loss_without_labels_is_measured(tmp_path: Path) -> None:
    rows = [{"x": torch.randn(4)} for _ in range(8)]
    one = trainer(tmp_path, rows, model=Contrastive(), max_steps=2)
    assert one.can_return_loss
    one.train()
    assert one.evaluate(rows)["eval_loss"] > 0
    told = [{**row, "return_loss": False} for row in rows]
    one.data_collator = lambda samples: {"x": torch.stack([row["x"] for row in samples]), "return_loss": False}
    assert "eval_loss" not in one.evaluate(told)


# -- settings ----------------------------------------------------------------------------------------------------------
def gradients_of(tmp_path: Path, model: Any, rows: list[Any] = ROWS, **given: Any) -> dict[str, torch.Tensor]:
    """The gradients of the first step."""
    found: dict[str, torch.Tensor] = {}

    class Watching(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    given = {"train_sampling_strategy": "sequential", "max_grad_norm": 0.0, "max_steps": 1, **given}
    trainer(tmp_path, rows, model=model, callbacks=[Watching()], **given).train()
    return found


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}])
def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(kwargs: Any, tmp_path: Path) -> None:
    calls: list[int] = []

    def counting(model: Any) -> Any:
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        return model

    plain = gradients_of(tmp_path / "plain", counting(llama()))
    assert len(calls) == 1
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    recomputed = gradients_of(tmp_path / "recomputed", counting(llama()), **settings)
    assert len(calls) == 3
    assert all(torch.allclose(value, recomputed[name]) for name, value in plain.items())


def test_gradient_checkpointing_is_refused_where_the_model_has_no_support(tmp_path: Path) -> None:
    from transformers import DPRConfig, DPRReader

    model = DPRReader(DPRConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    model.supports_gradient_checkpointing = False
    one = trainer(tmp_path, ROWS, model=model, gradient_checkpointing=True)
    with pytest.raises(ConfigError, match=r"gradient_checkpointing = True: .*does not support"):
        one.train()


def test_neftune_disturbs_the_embeddings_while_training_only(tmp_path: Path) -> None:
    one = llama()
    noise: dict[bool, float] = {}

    class Listening(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            def listen(layer: Any, inputs: Any, output: torch.Tensor) -> None:
                noise[layer.training] = float((output - layer.weight[inputs[0]]).detach().abs().max())

            model.get_input_embeddings().register_forward_hook(listen)

    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "neftune_noise_alpha": 5.0}
    trained = trainer(tmp_path, ROWS, model=one, eval_dataset=ROWS, callbacks=[Listening()], **given)
    trained.train()
    bound = 5.0 / (8 * 16) ** 0.5
    assert 0.9 * bound < noise[True] <= bound * 1.0001
    assert noise[False] == 0.0
    assert len(one.get_input_embeddings()._forward_hooks) == 1  # the listener's


def test_neftune_disturbs_the_model_that_model_init_made(tmp_path: Path) -> None:
    losses = [
        trainer(tmp_path, ROWS, model_init=llama, max_steps=1, neftune_noise_alpha=alpha).train().training_loss
        for alpha in (None, 50.0)
    ]
    assert losses[0] != losses[1]


def test_liger_kernels_need_their_package(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"use_liger_kernel = True: .*pip install liger-kernel"):
        trainer(tmp_path, ROWS, model=llama(), use_liger_kernel=True)
