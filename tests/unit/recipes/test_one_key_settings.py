"""What one key of train.args changes in any recipe of transformers: memory or speed, and not what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flows.new_project.starter_data import modules
from tests.support.named_recipes import Prepared, prepare_file, trainer_of
from trainer_lib import Trainer
from trainer_lib.errors import ConfigError
from trainer_lib.recipes.tokenizing import new_config

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    options = {"text": "line", "label": "module", "max_length": 16, "vocabulary": 300}
    file = tmp_path_factory.mktemp("prepared") / "lines.csv"
    return prepare_file("text-classification", file, modules(), options)


class Counting(Trainer):
    """Counts how often a layer ran forward in training."""

    calls = 0

    def count(self, module: Any, inputs: Any, outputs: Any) -> None:
        self.calls += self.model.training


def trained(prepared: Prepared, folder: Path, **settings: Any) -> tuple[Counting, dict[str, torch.Tensor]]:
    recipe, splits, data = prepared
    torch.manual_seed(0)
    model = recipe.build_model({"config": {**TINY, **NO_DROPOUT}}, data)
    settings["per_device_train_batch_size"] = 4
    trainer = trainer_of(recipe, data, model, folder, splits["train"], 3, base=Counting, **settings)
    hook = trainer.model.bert.encoder.layer[0].output.dense.register_forward_hook(trainer.count)
    trainer.train()
    hook.remove()
    return trainer, {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


def test_activations_are_computed_again_and_no_weight_changes(prepared: Prepared, tmp_path: Path) -> None:
    plain, weights = trained(prepared, tmp_path)
    saving, same = trained(prepared, tmp_path, gradient_checkpointing=True)
    assert (plain.calls, saving.calls) == (3, 6), "each step runs the layer forward once more"
    assert all(torch.allclose(weights[name], same[name], rtol=1e-5, atol=1e-7) for name in weights)


MISSPELT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "configuration": ({"config": {"hidden_sise": 32}}, {}, 'config.hidden_sise = 32: .*"hidden_size"'),
    "type of the model": ({"config": {"model_type": "brt"}}, {}, 'config.model_type = brt: .*"bert"'),
    "configuration inside": (
        {"config": {"model_type": "clip", "text_config": {"hidden_sise": 32}}},
        {},
        'config.text_config.hidden_sise = 32: .*"hidden_size"',
    ),
    "configuration beside a folder": ({"folder": "x", "config": TINY}, {}, "train.model.config = .*Remove it"),
    "optimizer": ({}, {"optim_args": "weight_decai=0.1"}, 'optim_args.weight_decai = 0.1: .*"weight_decay"'),
    "schedule": (
        {},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycle": 2}},
        'lr_scheduler_kwargs.num_cycle = 2: .*"num_cycles"',
    ),
    "checkpointing": (
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrent": True}},
        'gradient_checkpointing_kwargs.use_reentrent = True: .*"use_reentrant"',
    ),
}


@pytest.mark.parametrize("case", MISSPELT)
def test_a_misspelt_setting_is_refused_with_the_nearest_name(case: str, prepared: Prepared, tmp_path: Path) -> None:
    model, settings, said = MISSPELT[case]
    recipe, splits, data = prepared
    with pytest.raises(ConfigError, match=said):
        built = recipe.build_model({"config": TINY, **model}, data)
        trainer_of(recipe, data, built, tmp_path, splits["train"], 3, **settings).train()


def test_settings_that_a_configuration_takes_under_other_names_are_taken() -> None:
    for kind, settings in (
        ("llama", {"rope_theta": 1e6, "attn_implementation": "eager", "num_labels": 3, "dtype": "float32"}),
        ("t5", {"hidden_size": 32, "num_attention_heads": 2}),
        ("clip", {"text_config": {"hidden_size": 32}}),
    ):
        new_config({"model_type": kind, **settings}, settings, field="train.model.config")
