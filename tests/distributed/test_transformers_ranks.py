"""Real models on two ranks: the loss of one big batch, one resumed run, one file of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import loaded, run_distributed
from tests.support.gradients import assert_close, gradients
from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from tests.support.training import trainer

QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    with loaded("transformers.models.llama.modeling_llama", "peft"):
        yield


def classifier() -> Any:
    return bert(**QUIET)


def first_step(kind: str, smoothing: float) -> Any:
    model, rows = (llama, lm_rows(24)) if kind == "decoder" else (classifier, text_rows(24))
    # 11 rows in micro-batches of 3: 6 rows on one rank, 5 on the other, unequal token counts everywhere.
    return gradients(rows, micro=3, batch=11, model=model, label_smoothing_factor=smoothing)


@pytest.mark.parametrize(("kind", "smoothing"), [("decoder", 0.0), ("classifier", 0.1)])
def test_two_ranks_have_the_loss_and_gradients_of_one_big_batch(kind: str, smoothing: float) -> None:
    model, rows = (llama, lm_rows(24)) if kind == "decoder" else (classifier, text_rows(24))
    whole = gradients(rows, micro=11, batch=11, model=model, label_smoothing_factor=smoothing)
    for found in run_distributed(first_step, 2, kind, smoothing):
        assert_close(found, whole, rtol=1e-4, atol=1e-7)


def adapted(folder: str) -> dict[str, Any]:
    import warnings

    from peft import LoraConfig, get_peft_model

    warnings.filterwarnings("ignore", category=FutureWarning)
    base = llama()
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    one = trainer(
        folder,
        lm_rows(16),
        model=model,
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
        include_num_input_tokens_seen="all",
    )
    one.train()
    one.save_model()
    return {"tokens": one.state.num_input_tokens_seen, "flos": one.state.total_flos}


def test_ranks_write_one_set_of_adapters_and_add_up_tokens_and_operations(tmp_path: Path) -> None:
    results = run_distributed(adapted, 2, str(tmp_path))
    assert results[0] == results[1]
    assert results[0]["tokens"] == 2 * 2 * 4 * 8
    base = llama()
    weights = base.num_parameters(exclude_embeddings=True) + 2 * (16 * 2 + 2 * 16)
    assert results[0]["flos"] == 6 * weights * results[0]["tokens"]
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert (tmp_path / "checkpoint-2" / "adapter_config.json").is_file()
