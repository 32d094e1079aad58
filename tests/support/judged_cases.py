"""The losses of TRL's trainers on judged answers beside those of our recipes, of the same batches and weights.

python -m tests.support.judged_cases answer.json     (where TRL can be imported)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import pad

from tests.support import tiny_models, trl_cases
from trainer_lib import TrainingArguments
from trainer_lib.recipes import feedback_optimization, preference_optimization, reward_modeling
from trainer_lib.recipes.texts.answers import log_probabilities

Losses = tuple[float, float]
"""TRL's loss, and ours."""


def moved(trainer: Any) -> tuple[Any, Any]:
    """The model of TRL's trainer with weights apart from those of the reference, and its first batch.

    The reference moves further, so the divergence from it is above 0.
    """
    torch.manual_seed(1)
    for model, much in ((trainer.model, 0.3), (getattr(trainer, "ref_model", None), 0.6)):
        for each in () if model is None else model.parameters():
            each.data += much * torch.randn_like(each)
    return trainer.model.eval(), next(iter(trainer.get_train_dataloader()))


def ours(recipe: ModuleType, folder: str, model: Any, inputs: dict[str, Any], **settings: Any) -> float:
    """The loss of a batch by the recipe's Trainer."""
    model.preference = settings
    trainer = recipe.Trainer(model=model, args=TrainingArguments(output_dir=folder, use_cpu=True, report_to="none"))
    return float(trainer.judge(model, inputs)[0].mean())


def answers(reference: Any, *columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Our batch of TRL's tokens, attention masks and masks of answers, a column of answers behind the other."""
    width = max(tokens.shape[1] for tokens, _, _ in columns)
    parts = zip(*columns, strict=True)
    tokens, seen, is_answer = (torch.cat([pad(each, (0, width - each.shape[1])) for each in part]) for part in parts)
    targets = torch.where(is_answer.bool(), tokens, -100)
    batch = {"input_ids": tokens, "attention_mask": seen, "targets": targets}
    lengths = torch.stack((targets >= 0).sum(dim=1).chunk(2), dim=1)
    made = {**batch, "lengths": lengths}
    if reference is not None:
        made["reference"] = torch.stack(log_probabilities(reference.eval(), batch).chunk(2), dim=1)
    return made


def dpo(folder: str) -> Losses:
    """Pairs, next to a reference."""
    trainer = trl_cases.dpo(folder)
    model, batch = moved(trainer)
    inputs = answers(trainer.ref_model, (batch["input_ids"], batch["attention_mask"], batch["completion_mask"]))
    settings = {"beta": trainer.beta, "loss": "sigmoid"}
    found = ours(preference_optimization, folder, model, inputs, **settings)
    return float(trainer.compute_loss(model, batch)), found


def orpo(folder: str) -> Losses:
    """Pairs without a reference, less the likelihood: TRL's is also of the prompt."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    data = trl_cases.pairs()
    trainer = ORPOTrainer(
        model=tiny_models.llama(),
        args=ORPOConfig(output_dir=folder, **{**trl_cases.RUN, "max_length": 16}),
        train_dataset=data,
        eval_dataset=data.select(range(5)),
        processing_class=trl_cases.tokenizer(),
    )
    model, batch = moved(trainer)
    chosen, _, _, _, likelihood = trainer.concatenated_forward(model, batch)
    columns = [
        (batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"], batch[f"{name}_labels"] >= 0)
        for name in ("chosen", "rejected")
    ]
    settings = {"beta": trainer.beta, "loss": "orpo"}
    found = ours(preference_optimization, folder, model, answers(None, *columns), **settings)
    return float(trainer.get_batch_loss_metrics(model, batch)[0] - likelihood), found + float(chosen.mean())


def kto(folder: str) -> Losses:
    """Marks, next to a reference, with the divergence of the batch."""
    trainer = trl_cases.kto(folder, per_device_train_batch_size=8)
    model, batch = moved(trainer)
    columns = [
        tuple(batch[f"{kind}{name}"] for name in ("input_ids", "attention_mask", "completion_mask"))
        for kind in ("", "KL_")
    ]
    inputs = answers(trainer.ref_model, *columns)
    inputs["labels"] = torch.as_tensor(batch["label"]).long()
    trainer.compute_loss(model, batch)
    assert trainer._metrics["eval"]["kl"][0] > 0
    found = ours(feedback_optimization, folder, model, inputs, beta=trainer.beta, good_weight=1.0, bad_weight=1.0)
    return float(trainer.compute_loss(model, batch)), found


def reward(folder: str) -> Losses:
    trainer = trl_cases.reward(folder)
    model, batch = moved(trainer)
    inputs = answers(None, (batch["input_ids"], batch["attention_mask"], batch["attention_mask"]))
    return float(trainer.compute_loss(model, batch)), ours(reward_modeling, folder, model, inputs)


CASES: dict[str, Callable[[str], Losses]] = {"dpo": dpo, "orpo": orpo, "kto": kto, "reward": reward}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        found = {name: case(folder) for name, case in CASES.items()}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
