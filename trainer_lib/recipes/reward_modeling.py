"""The recipe reward-modeling: from pairs of a better and a worse answer a model learns to give answers a score.

    recipe: reward-modeling
    prepare:
      sources: [pairs.jsonl]  # {"prompt": …, "chosen": …, "rejected": …}: texts, or lists of {role, content}
      options: {pretrained: Qwen/Qwen2.5-0.5B-Instruct, max_length: 512}
    train:
      model: {pretrained: Qwen/Qwen2.5-0.5B-Instruct, adapter: {rank: 8}}
      args: {num_train_epochs: 1, learning_rate: 1.0e-4, global_batch_size: 16}
    evaluate: {splits: [validation, test]}

The score is that of Bradley and Terry: its difference is the log odds that an answer is preferred to another one
(Bai et al., 2022). It is the output of a model for the classification of sequences, and is published as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import DataError
from trainer_lib.recipes.preference_optimization import NAMES, PreferredPairs
from trainer_lib.recipes.preference_optimization import compute_metrics as measure_pairs
from trainer_lib.recipes.preference_optimization import prediction_columns as describe_pairs
from trainer_lib.recipes.shared.model_places import SMALL_LLAMA, build_classifier
from trainer_lib.recipes.shared.recipe_options import PathOptions
from trainer_lib.recipes.texts.answers import ANSWERED, AnswerTrainer, collate_answers

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

COMPLETION = "completion"
"""The column of new rows with an answer."""


class RankedPairs(PreferredPairs):
    """The rows of a table by split: a prompt where they have one, the better answer, and the other one."""

    needs_prompt = False
    reserved = ("labels", "row_id", COMPLETION)
    defaults: Mapping[str, Any] = {
        **ANSWERED,
        "chosen": "chosen",  # column with the better answers
        "rejected": "rejected",  # column with the other answers
    }


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the pairs, and find a tokenizer for them.

    Returns:
        For every split its rows: the three texts by the names of their columns, lists of turns as JSON; in `labels`
        0, the place of the chosen answer; `row_id`.
    """
    table = RankedPairs(options, out)
    texts = table.read_texts()
    table.tokenize(texts, out)
    out.info.update(completion=COMPLETION, classes=NAMES, pad_token_id=out.info["ends"]["pad_token_id"])
    out.info["new_columns"] |= {COMPLETION: "string"}
    out.info["new_rows"]["optional"].append(COMPLETION)
    columns = {table.options[name]: texts[name] for name in texts}
    return table.rows([0] * len(table.table), {**columns, **table.context})


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build a model with one output by name, from a folder, or at random from a configuration.

    Args:
        options: the settings of `model_places.MODEL`, and `new_head`: replace a head that has other outputs.

    Raises:
        ConfigError: transformers cannot load it, or its head has other outputs.
    """
    small = {**SMALL_LLAMA, "max_position_embeddings": data.info["max_length"]}
    settings = {"pad_token_id": data.info["pad_token_id"], "id2label": {0: "reward"}, "label2id": {"reward": 0}}
    return build_classifier(options, data, head="ForSequenceClassification", task="SEQ_CLS", small=small, **settings)


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch of `collate_answers`: answers ``[answers x rows, tokens]``.

    New rows have an answer in `completion`, or pairs.

    Raises:
        DataError: there is no answer, or its prompt leaves no room for it.
    """
    names = [COMPLETION] if COMPLETION in rows[0] else NAMES
    if data.info[names[0]] not in rows[0]:
        remedy = f"Give it in the column '{COMPLETION}'."
        raise DataError("There is no answer to give a score to.", field="rows", value=sorted(rows[0]), remedy=remedy)
    return collate_answers(rows, data, names)


def reward_losses(scores: Tensor) -> Tensor:
    """The losses of pairs ``[pairs]``, of scores ``[pairs, 2]``, the better answer's first (Bai et al., 2022)."""
    return -nn.functional.logsigmoid(scores[:, 0] - scores[:, 1])


class Trainer(AnswerTrainer):
    """A Trainer that gives answers a score."""

    @override
    def judge(self, model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        scores = self.answer(model, inputs)
        return reward_losses(scores), scores

    @override
    def answer(self, model: nn.Module, inputs: Any) -> Tensor:
        with self.autocast_smart_context_manager():
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])["logits"]
        return torch.stack(logits[:, 0].float().chunk(inputs["lengths"].shape[1]), dim=1)


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Compare how often the chosen answer has the higher reward with what the lengths of answers tell."""
    return {name: value for name, value in measure_pairs(evaluation).items() if "reference" not in name}


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn rewards ``[rows, answers]`` into a column; of pairs also into the answer that is preferred."""
    return describe_pairs(predictions, data) if predictions.shape[1] == 2 else {"reward": predictions[:, 0].tolist()}
