"""Losses of real models are means over all target items of the global batch, whether or not they take the count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.gradients import assert_close, gradients
from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from trainer_lib import Trainer
from trainer_lib.trainer.weighting import CountedItems

TOKENS = lm_rows(24)
TEXTS = text_rows(24)
QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# transformers' losses are computed in single precision.
SINGLE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-7}


def classifier() -> Any:
    return bert(**QUIET)


def masked() -> Any:
    return bert(cls="BertForMaskedLM", **QUIET)


@settings(max_examples=8)
@given(micro=st.integers(1, 9), batch=st.integers(1, 24), smoothing=st.sampled_from([0.0, 0.1]))
def test_any_cut_of_a_decoders_batch_has_the_same_loss_and_gradients(micro: int, batch: int, smoothing: float) -> None:
    given: dict[str, Any] = {"model": llama, "batch": batch, "label_smoothing_factor": smoothing}
    assert_close(gradients(TOKENS, micro=micro, **given), gradients(TOKENS, micro=batch, **given), **SINGLE)


@settings(max_examples=6)
@given(micro=st.integers(1, 9), batch=st.integers(1, 24), smoothing=st.sampled_from([0.0, 0.1]))
def test_any_cut_of_a_classifiers_batch_has_the_same_loss_and_gradients(
    micro: int, batch: int, smoothing: float
) -> None:
    given: dict[str, Any] = {"model": classifier, "batch": batch, "label_smoothing_factor": smoothing}
    assert_close(gradients(TEXTS, micro=micro, **given), gradients(TEXTS, micro=batch, **given), **SINGLE)


def test_a_masked_language_model_that_ignores_the_count_has_the_exact_loss() -> None:
    whole = gradients(TOKENS, micro=12, batch=12, model=masked)
    assert_close(gradients(TOKENS, micro=5, batch=12, model=masked), whole, **SINGLE)


def test_rows_that_pad_to_unequal_lengths_have_the_exact_loss() -> None:
    rows = [{name: value[: 3 + number % 5] for name, value in row.items()} for number, row in enumerate(TOKENS)]

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        padded = nn.utils.rnn.pad_sequence
        return {
            name: padded([row[name] for row in samples], batch_first=True, padding_value=fill[name]) for name in fill
        }

    given: dict[str, Any] = {"model": llama, "batch": 16, "data_collator": collate}
    assert_close(gradients(rows, micro=3, **given), gradients(rows, micro=16, **given), **SINGLE)


class PassesOn(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize(("model", "rows"), [(llama, TOKENS), (classifier, TEXTS)])
def test_an_override_may_pass_the_count_to_a_model_that_uses_it_or_not(model: Any, rows: list[Any]) -> None:
    whole = gradients(rows, micro=12, batch=12, model=model)
    assert_close(gradients(rows, micro=5, batch=12, model=model, cls=PassesOn), whole, **SINGLE)


def test_the_count_notes_computations_and_no_looks() -> None:
    items = CountedItems.of(12, torch.device("cpu"))
    assert items.device.type == "cpu"
    assert not items.is_floating_point()
    assert torch.is_tensor(items)
    copy: Any = items.to(torch.float32).clamp(min=1)
    looked = items.used
    assert float(torch.ones(()) / copy) == pytest.approx(1 / 12)
    assert (looked, items.used, copy.used) == (False, True, True)


def test_encoder_decoders_count_every_label_and_keep_what_shifts_their_inputs() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    def t5() -> Any:
        sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        config = T5Config(vocab_size=32, dropout_rate=0.0, **sizes)
        config.decoder_start_token_id = 0
        return T5ForConditionalGeneration(config)

    for smoothing in (0.0, 0.1):
        given: dict[str, Any] = {"model": t5, "batch": 12, "label_smoothing_factor": smoothing}
        assert_close(gradients(TOKENS, micro=5, **given), gradients(TOKENS, micro=12, **given), **SINGLE)
