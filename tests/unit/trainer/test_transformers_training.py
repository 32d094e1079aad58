"""Settings around real models: compilation, recomputation, noise, precision, several trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from tests.support.toys import TokenModel, classification_rows, token_rows
from tests.support.training import assert_equal, final_state, logged, trainer
from trainer_lib.errors import ConfigError
from trainer_lib.trackers.callback import TrackingCallback

ROWS = lm_rows(16)


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


def test_torch_compile_hands_the_model_to_its_backend(compiled: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_steps": 3, "logging_strategy": "steps", "logging_steps": 1}
    plain = trainer(tmp_path / "plain", token_rows(12), model_init=TokenModel, **given)
    plain.train()
    given |= {"torch_compile_backend": "noting", "torch_compile_mode": "reduce-overhead"}
    one = trainer(tmp_path / "compiled", token_rows(12), model_init=TokenModel, **given)
    assert one.args.torch_compile
    one.train()
    assert compiled["graphs"] > 0
    assert compiled["mode"] == "reduce-overhead"
    assert [entry.get("loss") for entry in logged(one)] == pytest.approx([e.get("loss") for e in logged(plain)])
    one.save_model()
    assert all(not name.startswith("_orig_mod") for name in one.model.state_dict())


def test_a_compiled_model_of_transformers_has_the_exact_loss(compiled: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    plain = trainer(tmp_path / "plain", ROWS, model=llama(num_hidden_layers=1), **given).train()
    given |= {"torch_compile_backend": "noting"}
    one = trainer(tmp_path / "compiled", ROWS, model=llama(num_hidden_layers=1), **given).train()
    assert compiled["graphs"] > 0
    assert one.training_loss == pytest.approx(plain.training_loss, rel=1e-5)


def test_the_cache_of_the_device_is_emptied_every_so_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_neftune_takes_the_only_embedding_of_a_plain_module_and_refuses_to_guess(tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_steps": 1, "train_sampling_strategy": "sequential"}
    losses = [
        trainer(tmp_path, token_rows(8), model=TokenModel(), neftune_noise_alpha=alpha, **given).train().training_loss
        for alpha in (None, 50.0)
    ]
    assert losses[0] != losses[1]

    class Two(TokenModel):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Embedding(7, 8)

    with pytest.raises(ConfigError, match=r"neftune_noise_alpha = 5.0: It is not clear which embedding"):
        trainer(tmp_path, token_rows(8), model=Two(), neftune_noise_alpha=5.0)


# -- precision ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "dtype"), [("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)])
def test_a_full_evaluation_in_half_precision_leaves_every_bit_as_it_was(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
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


def test_a_half_precision_model_stays_one_after_a_full_evaluation(tmp_path: Path) -> None:
    model = llama().to(torch.bfloat16)
    trainer(tmp_path, ROWS, model=model, eval_dataset=ROWS, fp16_full_eval=True).evaluate()
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_label_smoothing_is_switched_off_for_labels_that_do_not_exclude_one_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**row, "labels": torch.tensor([1.0, 0.0, 1.0])} for row in text_rows(8)]
    model = bert(problem_type="multi_label_classification")
    one = trainer(tmp_path, rows, model=model, max_steps=1, label_smoothing_factor=0.1)
    one.train()
    assert one.label_smoother is None
    assert "label_smoothing_factor is ignored" in caplog.text


# -- several trainings -------------------------------------------------------------------------------------------------
def test_model_init_makes_the_same_model_for_every_training(tmp_path: Path) -> None:
    def make() -> Any:
        made.append(bert(seed=int(torch.initial_seed())))
        return made[-1]

    made: list[Any] = []
    one = trainer(tmp_path, text_rows(12), model_init=make, max_steps=3)
    one.train()
    first = final_state(one)
    one.train()
    assert_equal(first, final_state(one))
    assert len(made) == 3
    assert one.model is made[-1]


def test_full_determinism_switches_torchs_algorithms_and_repeats_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    states = []
    try:
        for run in ("one", "two"):
            one = trainer(tmp_path / run, text_rows(12), model=bert(), max_steps=3, full_determinism=True)
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.backends.cudnn.deterministic
            one.train()
            states.append(final_state(one))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    assert_equal(*states)


def test_trackers_get_the_models_configuration_and_the_arguments(tmp_path: Path) -> None:
    class Noting:
        """A tracker that keeps what it is told."""

        params: dict[str, Any]

        def start(self, *, run_name: str | None, params: dict[str, Any], resume_step: int) -> None:
            self.params = params

        log = close = lambda self, *_, **__: None

    tracker: Any = Noting()
    callbacks = [TrackingCallback([tracker])]
    trainer(tmp_path, ROWS, model=llama(), max_steps=1, callbacks=callbacks, learning_rate=0.5).train()
    assert tracker.params["model_type"] == "llama"
    assert tracker.params["num_hidden_layers"] == 2
    assert tracker.params["learning_rate"] == 0.5
