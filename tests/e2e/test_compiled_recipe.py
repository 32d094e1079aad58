"""A recipe with `torch_compile: true` among its arguments learns what it learns without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flows.new_project.starter_data import modules
from tests.support.named_recipes import Prepared, prepare_file, trainer_of
from trainer_lib import Trainer

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    options = {"text": "line", "label": "module", "max_length": 16, "vocabulary": 300}
    file = tmp_path_factory.mktemp("prepared") / "lines.csv"
    return prepare_file("text-classification", file, modules(), options)


def trained(prepared: Prepared, folder: Path, **settings: Any) -> tuple[Trainer, dict[str, torch.Tensor]]:
    recipe, splits, data = prepared
    torch.manual_seed(0)
    model = recipe.build_model({"config": {**TINY, **NO_DROPOUT}}, data)
    settings["per_device_train_batch_size"] = 4
    trainer = trainer_of(recipe, data, model, folder, splits["train"], 2, **settings)
    trainer.train()
    return trainer, {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


def test_a_compiled_model_learns_the_same(prepared: Prepared, tmp_path: Path) -> None:
    _, plain = trained(prepared, tmp_path)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(backend, "counted")
    trainer, compiled = trained(prepared, tmp_path, torch_compile=True, torch_compile_backend="counted")
    assert graphs, "the model was compiled"
    assert all(torch.allclose(plain[name], compiled[name], rtol=1e-5, atol=1e-7) for name in plain)
    assert trainer.evaluate(eval_dataset=prepared[1]["test"][:8])["eval_accuracy"] >= 0
    torch._dynamo.reset()
