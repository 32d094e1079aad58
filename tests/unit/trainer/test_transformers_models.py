"""Models of transformers: saved so that `from_pretrained` loads them, resumed bit for bit, and given what they take."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.gradients import assert_close, gradients
from tests.support.tiny_models import bert, llama, lm_rows, text_rows, tokenizer
from tests.support.toys import Classifier, TokenModel, classification_rows, token_rows
from tests.support.training import Note, assert_equal, final_state, logged, trained, trainer
from trainer_lib import default_data_collator
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.trackers.vendors import TrackingCallback

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
    trained(tmp_path, ROWS, model=model, processing_class=tokenizer(), **given).save_model(str(tmp_path / "model"))
    for folder in ("model", "checkpoint-2"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert same_weights(loaded, model) and (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert loaded.generation_config.max_new_tokens == 5 and loaded.config.architectures == ["LlamaForCausalLM"]
        assert loaded.config.use_cache is True
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("cat sat")["input_ids"] == [5, 7]


def test_the_collators_tokenizer_is_saved_when_no_processing_class_is_given(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    trainer(tmp_path, ROWS, model=llama(), data_collator=collator).save_model()
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


# -- what a model is given ---------------------------------------------------------------------------------------------
def test_keys_and_values_are_not_kept_while_training_unless_asked_for(tmp_path: Path) -> None:
    for asked in (False, True):
        seen, model = Note("on_step_end", lambda state, model, **_: model.config.use_cache), llama()
        trainer(tmp_path, ROWS, model=model, max_steps=1, callbacks=[seen], use_cache=asked).train()
        assert (seen.kept, model.config.use_cache) == ([asked], True)


def test_predictions_leave_out_keys_and_values_and_what_the_configuration_says(tmp_path: Path) -> None:
    model = llama()
    assert any("Cache" in type(value).__name__ for value in model(torch.tensor([[1, 2]])).values())
    predictions = trainer(tmp_path, ROWS, model=model).predict(ROWS).predictions
    assert isinstance(predictions, np.ndarray) and predictions.shape == (16, 8, 32)
    model.config.keys_to_ignore_at_inference = ["logits", "cache", "past_key_values"]
    assert trainer(tmp_path, ROWS, model=model).predict(ROWS).predictions is None


def test_question_answering_has_two_labels(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "start_positions": 1, "end_positions": 3} for row in text_rows(8)]
    one = trainer(tmp_path, rows, model=bert(cls="BertForQuestionAnswering", num_labels=2), max_steps=2)
    assert one.label_names == ["start_positions", "end_positions"]
    one.train()
    output = one.predict(rows)
    assert [part.shape for part in output.predictions] == [(8, 8), (8, 8)]
    assert [part.tolist() for part in output.label_ids] == [[1] * 8, [3] * 8] and output.metrics is not None
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
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}])
def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(kwargs: Any) -> None:
    calls: list[int] = []

    def counting() -> Any:
        model = llama()
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        return model

    plain = gradients(ROWS, micro=4, batch=4, model=counting)
    assert len(calls) == 1
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    assert_close(gradients(ROWS, micro=4, batch=4, model=counting, **settings), plain)
    assert len(calls) == 3


def test_neftune_disturbs_the_embeddings_while_training_only(tmp_path: Path) -> None:
    one, noise = llama(), dict[bool, float]()

    def listen(layer: Any, inputs: Any, output: torch.Tensor) -> None:
        noise[layer.training] = float((output - layer.weight[inputs[0]]).detach().abs().max())

    # After the hook that disturbs.
    listening = Note("on_train_begin", lambda state, **_: one.get_input_embeddings().register_forward_hook(listen))
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "neftune_noise_alpha": 5.0}
    trainer(tmp_path, ROWS, model=one, eval_dataset=ROWS, callbacks=[listening], **given).train()
    bound = 5.0 / (8 * 16) ** 0.5
    assert 0.9 * bound < noise[True] <= bound * 1.0001
    assert noise[False] == 0.0
    assert len(one.get_input_embeddings()._forward_hooks) == 1  # the listener's


def test_liger_kernels_need_their_package(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"use_liger_kernel = True: .*pip install liger-kernel"):
        trainer(tmp_path, ROWS, model=llama(), use_liger_kernel=True)


# -- compilation -------------------------------------------------------------------------------------------------------
@pytest.fixture
def compiled() -> Any:
    """A backend that notes the graphs it is given and its mode, and runs them as they are."""
    from torch._dynamo.backends import registry

    noted: dict[str, Any] = {"graphs": 0, "mode": None}

    def noting(graph: Any, inputs: Any, mode: str | None = None) -> Any:
        noted["graphs"] += 1
        noted["mode"] = mode
        return graph.forward

    registry.register_backend(noting, name="noting")
    yield noted
    registry._COMPILER_FNS.pop("noting")
    torch._dynamo.reset()


def test_torch_compile_calls_its_backend_and_has_the_exact_loss(compiled: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    given |= {"logging_strategy": "steps", "logging_steps": 1}
    plain = trained(tmp_path / "plain", ROWS, model=llama(num_hidden_layers=1), **given)
    given |= {"torch_compile_backend": "noting", "torch_compile_mode": "reduce-overhead"}
    one = trained(tmp_path / "compiled", ROWS, model=llama(num_hidden_layers=1), **given)
    assert one.args.torch_compile
    assert compiled["graphs"] > 0 and compiled["mode"] == "reduce-overhead"
    losses = [[entry["loss"] for entry in logged(each) if "loss" in entry] for each in (one, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    one.save_model()
    assert all(not name.startswith("_orig_mod") for name in one.model.state_dict())


def test_the_devices_cache_is_emptied_every_so_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    one = trainer(tmp_path, classification_rows(24), max_steps=5, torch_empty_cache_steps=2)
    monkeypatch.setattr(
        "trainer_lib.trainer.loop.empty_device_cache", lambda device: emptied.append(one.state.global_step)
    )
    one.train()
    assert emptied == [2, 4]


# -- plain modules -----------------------------------------------------------------------------------------------------
class OldSwitch(TokenModel):
    """Offers recomputation itself, without settings."""

    on = False

    def gradient_checkpointing_enable(self) -> None:
        self.on = True


def test_a_plain_module_may_offer_gradient_checkpointing_without_settings(tmp_path: Path) -> None:
    old = OldSwitch()
    trainer(tmp_path, token_rows(4), model=old, activation_checkpointing=True, max_steps=1).train()
    assert old.on
    given: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    refused = trainer(tmp_path, token_rows(4), model=OldSwitch(), max_steps=1, **given)
    with pytest.raises(ConfigError, match=r"gradient_checkpointing_kwargs = .*takes no such settings"):
        refused.train()
    model = llama()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"gradient_checkpointing = True: .*does not support"):
        trainer(tmp_path, ROWS, model=model, gradient_checkpointing=True).train()


def test_neftune_does_not_guess_among_embeddings(tmp_path: Path) -> None:
    model = TokenModel()
    model.positions = nn.Embedding(7, 8)
    with pytest.raises(ConfigError, match=r"neftune_noise_alpha = 5.0: It is not clear which embedding"):
        trainer(tmp_path, token_rows(8), model=model, neftune_noise_alpha=5.0)


# -- precision ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "dtype"), [("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)])
def test_a_full_evaluation_in_half_precision_changes_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    seen: list[torch.dtype] = []
    model = llama(tie_word_embeddings=True)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    before = {name: each.clone() for name, each in [*model.named_parameters(), *model.named_buffers()]}
    given: dict[str, Any] = {name: True, "max_steps": 1}
    one = trainer(tmp_path, ROWS, model=model, eval_dataset=ROWS, **given)
    one.evaluate()
    assert set(seen) == {dtype}
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert "model.rotary_emb.inv_freq" in after  # in no state_dict
    assert all(value.dtype == after[name].dtype and torch.equal(value, after[name]) for name, value in before.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    seen.clear()
    one.train()
    assert set(seen) == {torch.float32}
    half = llama().to(torch.bfloat16)
    trainer(tmp_path, ROWS, model=half, eval_dataset=ROWS, **given).evaluate()
    assert {each.dtype for each in half.parameters()} == {torch.bfloat16}


def test_label_smoothing_is_off_where_several_labels_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row, "labels": torch.tensor([1.0, 0.0, 1.0])} for row in text_rows(8)]
    model = bert(problem_type="multi_label_classification")
    assert trained(tmp_path, rows, model=model, max_steps=1, label_smoothing_factor=0.1).label_smoother is None
    assert "label_smoothing_factor is ignored" in caplog.text


# -- several trainings -------------------------------------------------------------------------------------------------
def test_model_init_makes_the_same_model_for_every_training(tmp_path: Path) -> None:
    def make() -> Any:
        made.append(bert(seed=int(torch.initial_seed())))
        return made[-1]

    made: list[Any] = []
    one = trained(tmp_path, text_rows(12), model_init=make, max_steps=3)
    first = final_state(one)
    one.train()
    assert_equal(first, final_state(one))
    assert len(made) == 3
    assert one.model is made[-1]


def test_full_determinism_switches_algorithms_and_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what `enable_full_determinism` does, which the argument calls."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "1")
    monkeypatch.setattr("torch._inductor.config.deterministic", False)
    states = []
    try:
        for run in ("one", "two"):
            one = trainer(tmp_path / run, text_rows(12), model=bert(), max_steps=3, full_determinism=True)
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.backends.cudnn.deterministic and torch._inductor.config.deterministic
            one.train()
            states.append(final_state(one))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    assert_equal(*states)


def test_trackers_get_the_models_configuration_and_the_arguments(tmp_path: Path) -> None:
    told: dict[str, Any] = {}
    tracker: Any = SimpleNamespace(log=lambda *_, **__: None, close=lambda *_: None)
    tracker.start = lambda *, params, **_: told.update(params)
    callbacks = [TrackingCallback(tracker)]
    trainer(tmp_path, ROWS, model=llama(), max_steps=1, callbacks=callbacks, learning_rate=0.5).train()
    assert (told["model_type"], told["num_hidden_layers"], told["learning_rate"]) == ("llama", 2, 0.5)


# -- datasets ----------------------------------------------------------------------------------------------------------
def text_data(count: int = 12) -> Any:
    """Encoded texts with a column of strings beside what the model takes."""
    from datasets import Dataset

    rows = text_rows(count)
    columns = {name: [torch.as_tensor(row[name]).tolist() for row in rows] for name in ("input_ids", "attention_mask")}
    labels = [row["labels"] for row in rows]
    return Dataset.from_dict({**columns, "label": labels, "text": [f"text {i}" for i in range(count)]})


def test_all_formats_of_a_dataset_lose_the_columns_the_model_does_not_take_and_train_alike(tmp_path: Path) -> None:
    states = []
    for form in (None, "torch", "numpy"):
        data = text_data().with_format(form)
        sets = {"a": data, "b": data}
        one = trainer(tmp_path / str(form), data, model=bert(), eval_dataset=sets, max_steps=2)
        batch = next(iter(one.get_train_dataloader().micros(0, 0))).batch
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        one.train()
        states.append(final_state(one))
        metrics = one.evaluate()
        assert metrics["eval_a_loss"] == metrics["eval_b_loss"]
        assert one.predict(data).predictions.shape == (12, 3)
    assert_equal(states[0], states[1])
    assert_equal(states[0], states[2])


def test_an_iterable_dataset_loses_its_unused_columns_and_trains(tmp_path: Path) -> None:
    data = text_data().to_iterable_dataset()
    one = trained(tmp_path, data, model=bert(), max_steps=4, eval_dataset=data)
    assert one.state.global_step == 4 and one.evaluate()["eval_loss"] > 0
    assert one.predict(data).predictions.shape == (12, 3)


def test_a_tokenizers_padding_is_the_default_collator(tmp_path: Path) -> None:
    from datasets import Dataset

    encode = tokenizer()
    texts = ["the cat sat", "a dog", "the red dog ran under the old tree", "cat and dog"]
    data = Dataset.from_dict({"text": texts, "label": [0, 1, 2, 0]}).map(lambda row: encode(row["text"]))
    one = trainer(tmp_path, data, model=bert(), processing_class=encode, max_steps=1)
    assert next(iter(one.get_train_dataloader().micros(0, 0))).batch["input_ids"].shape == (4, 8)
    one.train()


# -- tokens and operations ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "masked", "expected"),
    [
        *(("all", True, 16 * 8), (True, True, 16 * 8), ("no", True, 0)),
        ("non_padding", True, 4 * (2 + 3 + 4 + 5)),
        ("non_padding", False, 4 * (2 + 3 + 4 + 5)),  # padding is then what the tokenizer says it is
    ],
)
def test_tokens_are_counted_as_asked(asked: Any, masked: bool, expected: int, tmp_path: Path) -> None:
    masks = [(torch.arange(8) < 2 + number % 4).long() for number in range(16)]
    rows = [
        {"input_ids": row["input_ids"] * mask, "labels": row["labels"], **({"attention_mask": mask} if masked else {})}
        for row, mask in zip(ROWS, masks, strict=True)
    ]
    given: dict[str, Any] = {"num_train_epochs": 1, "logging_strategy": "steps", "logging_steps": 4}
    given |= {"processing_class": tokenizer(), "data_collator": default_data_collator}
    one = trained(tmp_path, rows, model=llama(), include_num_input_tokens_seen=asked, **given)
    assert one.state.num_input_tokens_seen == expected
    assert one.state.log_history[0].get("num_input_tokens_seen") == (expected or None)


def test_a_batch_without_tokens_is_told_once_and_counts_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"include_num_input_tokens_seen": "all", "max_steps": 2}
    assert trained(tmp_path, classification_rows(8), **given).state.num_input_tokens_seen == 0
    assert [record.message for record in caplog.records if "No tokens are counted" in record.message] == [
        "No tokens are counted: batches have no 'input_ids' (give the model a main_input_name)."
    ]


def test_operations_are_six_per_token_or_sample_and_parameter_outside_the_embeddings(tmp_path: Path) -> None:
    model = llama()
    # transformers' BatchEncoding is a UserDict.
    given: dict[str, Any] = {"data_collator": lambda rows: UserDict(default_data_collator(rows))}
    one = trainer(tmp_path, ROWS, model=model, max_steps=2, **given)
    assert one.train().metrics["total_flos"] == 6 * model.num_parameters(exclude_embeddings=True) * 2 * 4 * 8
    assert one._trainflow.counters.own_tokens == 2 * 4 * 8

    tokens = trainer(tmp_path / "t", token_rows(8), model=TokenModel(), max_steps=2).train()
    assert tokens.metrics["total_flos"] == 6 * (8 * 11 + 11) * 2 * 4 * 7  # the head; the table multiplies nothing
    samples = trainer(tmp_path / "s", classification_rows(8), max_steps=2).train()
    assert samples.metrics["total_flos"] == 6 * sum(p.numel() for p in Classifier().parameters()) * 2 * 4
