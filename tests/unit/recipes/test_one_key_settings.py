"""What one key of train.args changes in any recipe of transformers: memory or speed, and not what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flows.new_project.starter_data import modules
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.storage import Store

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Prepared = tuple[Recipe, dict[str, list[Any]], DataInfo]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    where = tmp_path_factory.mktemp("prepared")
    (where / "lines.csv").write_text(modules())
    recipe = load(recipe_file("text-classification"), where)
    out = PrepareOutput(Store.open(where / "out"), [str(where / "lines.csv")])
    options = {"text": "line", "label": "module", "max_length": 16, "vocabulary": 300}
    splits = {name: [dict(row) for row in rows] for name, rows in recipe.prepare(options, out).items()}
    files = [vars(entry) for entry in out.files()]
    rows = {name: {"rows": len(each)} for name, each in splits.items()}
    data = {"url": str(where / "out"), "info": out.checked_info(), "splits": rows, "files": files}
    return recipe, splits, DataInfo(data)


class Counting(Trainer):
    """Counts how often a layer ran forward in training."""

    calls = 0

    def count(self, module: Any, inputs: Any, outputs: Any) -> None:
        self.calls += self.model.training


def trained(prepared: Prepared, folder: Path, **settings: Any) -> tuple[Counting, dict[str, torch.Tensor]]:
    recipe, splits, data = prepared
    torch.manual_seed(0)
    trainer = Counting(
        model=recipe.build_model({"config": {**TINY, **NO_DROPOUT}}, data),
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=3,
            per_device_train_batch_size=4,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            **settings,
        ),
        data_collator=recipe.collate_with(data),
        train_dataset=splits["train"],
        compute_metrics=recipe.compute_metrics_with(data),
    )
    model: Any = trainer.model
    hook = model.bert.encoder.layer[0].output.dense.register_forward_hook(trainer.count)
    trainer.train()
    hook.remove()
    return trainer, {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


def test_activations_are_computed_again_and_no_weight_changes(prepared: Prepared, tmp_path: Path) -> None:
    plain, weights = trained(prepared, tmp_path)
    saving, same = trained(prepared, tmp_path, gradient_checkpointing=True)
    assert (plain.calls, saving.calls) == (3, 6), "each step runs the layer forward once more"
    assert all(torch.allclose(weights[name], same[name], rtol=1e-5, atol=1e-7) for name in weights)
