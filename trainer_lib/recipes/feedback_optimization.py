"""The recipe feedback-optimization: from answers marked as good or bad a model learns to give good ones (KTO).

    recipe: feedback-optimization
    prepare:
      sources: [marked.jsonl]  # {"prompt": …, "completion": …, "label": true}: texts, or lists of {role, content}
      options: {pretrained: Qwen/Qwen2.5-0.5B-Instruct, max_length: 512}
    train:
      model: {pretrained: Qwen/Qwen2.5-0.5B-Instruct, adapter: {rank: 8}, beta: 0.1}
      args: {num_train_epochs: 1, learning_rate: 5.0e-6, global_batch_size: 16}
    evaluate: {splits: [validation, test]}

Kahneman-Tversky Optimization (Ethayarajh et al., 2024) needs no pairs: what an answer gains in log-probability over the
reference is compared to the divergence of the model from the reference. This is estimated on prompts with answers of
other rows, over all micro-batches and processes of a step, so it does not depend on how a batch is cut.
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
from trainer_lib.recipes.shared.recipe_options import PathOptions, choose
from trainer_lib.recipes.tables.table_files import TRUTH, Reader
from trainer_lib.recipes.texts import answers
from trainer_lib.recipes.texts.packed_batches import evaluating
from trainer_lib.recipes.texts.tokenizing import decode_tokens

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

OTHER = "other"
"""The column of prepared rows with the answer of another row."""


class MarkedAnswers(answers.AnsweredPrompts):
    """The rows of a table by split: a prompt, an answer, and whether it is good."""

    answer_options = ("completion",)
    label_option = "label"
    reserved = ("labels", "row_id", OTHER, "reference_completion", "reference_other")
    unclassed = "Marks of answers are no classes to cut by."
    defaults: Mapping[str, Any] = {
        **answers.ANSWERED,
        **answers.REFERENCE,
        "completion": "completion",  # column with the answers
        "label": "label",  # column with true for a good answer, false for a bad one
    }

    @override
    def _readers(self) -> dict[str, Reader]:
        return {**super()._readers(), self.options["label"]: _read_mark}

    @override
    def read_texts(self) -> dict[str, list[str]]:
        """As of any answers, and in `other` the answer of another row of the split, in an order that `seed` draws."""
        texts, draw = super().read_texts(), np.random.default_rng(self.options["seed"])
        order = np.arange(len(self.table))
        for rows in map(draw.permutation, self.splits.values()):
            order[rows] = np.roll(rows, 1)
        return {**texts, OTHER: [texts["completion"][row] for row in order]}


def _read_mark(value: Any, where: str) -> int:
    """1 for a good answer, 0 for a bad one. Raises DataError for another value."""
    if (text := str(value).strip().lower()) not in TRUTH:
        raise DataError(f"{where}: '{text[:40]}' is neither true nor false.", field="rows")
    return int(TRUTH[text])


# -- losses and metrics -----------------------------------------------------------------------------------------------
def feedback_losses(
    ratios: Tensor, divergence: Tensor, labels: Tensor, *, beta: float, good_weight: float = 1, bad_weight: float = 1
) -> Tensor:
    """The losses of answers ``[rows]`` (Ethayarajh et al., KTO, 2024, equations 7 and 8 less a constant).

    Args:
        ratios: ``[rows]``, the logarithm of an answer's probability less that by the reference.
        divergence: ``[]``, the divergence of the model from the reference, from 0 on.
        labels: ``[rows]``, 1 for a good answer.
        beta: how much a distance from the reference counts.
        good_weight, bad_weight: of good and of bad answers.
    """
    gains = beta * (ratios - divergence)
    good = labels > 0
    weights = torch.where(good, good_weight, bad_weight)
    return weights * (1 - torch.sigmoid(torch.where(good, gains, -gains)))


def _area(scores: Any, labels: Any) -> float:
    """The share of pairs of a good and a bad answer whose scores are in this order; without pairs a half."""
    good = np.asarray(labels) > 0
    above, below = np.asarray(scores)[good], np.sort(np.asarray(scores)[~good])
    places = np.searchsorted(below, above, "left") + np.searchsorted(below, above, "right")
    return float(places.mean()) / (2 * len(below)) if len(above) and len(below) else 0.5


# -- the recipe -------------------------------------------------------------------------------------------------------
def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the answers, find a tokenizer for them, and ask the reference for their probabilities.

    Returns:
        For every split its rows: the prompt and the answer by the names of their columns, lists of turns as JSON; in
        `other` the answer of another row; `reference_completion` and `reference_other`, the logarithms of these
        answers' probabilities; `labels`, 1 for a good answer; `row_id`.
    """
    table = MarkedAnswers(options, out)
    texts = table.read_texts()
    columns: dict[str, Any] = {table.options.get(name, name): column for name, column in texts.items()}
    columns |= table.context | table.ask_reference(table.tokenize(texts, out), out)
    out.info[OTHER] = OTHER
    return table.rows(list(table.table.columns[table.label]), columns)


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the model that the reference is, with adapters on request.

    Raises ConfigError: transformers cannot load it, it is not that of prepare, or a setting has no sense.
    """
    weights = {"good_weight": 1.0, "bad_weight": 1.0}  # of the losses of good and of bad answers
    chosen = choose(options, {**answers.POLICY, **weights}, field="train.model")
    for name in weights:
        answers.require_above_zero(name, chosen[name])
    return answers.build_policy(chosen, data, *weights)


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch of `collate_answers`: answers ``[2 rows, tokens]``, those of other rows last; of new rows none."""
    return answers.collate_answers(rows, data, ["completion", OTHER] if "labels" in rows[0] else ["completion"])


class Trainer(answers.PolicyTrainer):
    """A Trainer that measures the divergence from the reference before every step, and generates answers."""

    _divergence: Tensor | None = None

    @override
    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], Tensor | int | None]:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            self._divergence = self._measure(batches)
        return batches, items

    def _measure(self, batches: Sequence[Any]) -> Tensor:
        """The divergence ``[]`` over all rows of a step; a batch for which others wait has none."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        counts = [1] * len(batches) if self._trainflow.run is None else self._trainflow.run.weights.items
        with evaluating(self.model):
            for batch, count in zip(batches, counts, strict=True):
                ratios = self._ratios(self.model_wrapped, self._prepare_inputs(batch), 1).double()
                sums += torch.stack((ratios.sum(), torch.ones_like(ratios).sum())) * bool(count)
        total: Tensor = self._trainflow.world.comm.sum_tensor(sums)
        return (total[0] / total[1]).clamp(min=0).float()

    def _ratios(self, model: nn.Module, inputs: Any, column: int) -> Tensor:
        """The log-probabilities ``[rows]`` of a column of answers, less those by the reference."""
        tokens = {name: inputs[name].chunk(2)[column] for name in ("input_ids", "attention_mask", "targets")}
        own = self.log_probabilities(model, {**tokens, "lengths": inputs["lengths"]})
        ratios: Tensor = own[:, 0] - inputs["reference"][:, column]
        return ratios

    @override
    def judge(self, model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        settings, ratios = self.settings, self._ratios(model, inputs, 0)
        if model.training and self._divergence is not None:
            return feedback_losses(ratios, self._divergence, inputs["labels"], **settings), settings["beta"] * ratios
        others = self._ratios(model, inputs, 1).detach()  # an evaluation has the divergence of its batch
        losses = feedback_losses(ratios, others.mean().clamp(min=0), inputs["labels"], **settings)
        return losses, settings["beta"] * torch.stack((ratios, others), dim=1)


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure the probability that a good answer has a higher reward than a bad one (AUC), next to `beside_rules`.

    Predictions are rewards ``[rows, 2]``, of the answers, and of those of other rows to the prompts. Labels are 1 for
    a good answer ``[rows]``, and log-probabilities by the reference and lengths ``[rows, 4]``.
    """
    (labels, known), (every_label, every) = evaluation.label_ids, evaluation.whole_labels
    scores, divergence = np.asarray(evaluation.predictions, np.float64).T
    good, overall = np.asarray(labels) > 0, _area(every[:, 2], every_label)
    auc, reference, longer = (_area(values, labels) for values in (scores, known[:, 0], known[:, 2]))
    means = {name: float(scores[kind].mean()) if kind.any() else 0.0 for name, kind in (("good", good), ("bad", ~good))}
    return {
        **answers.beside_rules("auc", auc, reference, longer, overall),
        **{f"{name}_reward": mean for name, mean in means.items()},
        "divergence": max(0.0, float(divergence.mean())),
    }


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn rewards ``[rows, …]`` into a column, or tokens into a new answer."""
    if predictions.dtype.kind in "iu":
        return {"prediction": decode_tokens(predictions, data)}
    return {"reward": predictions[:, 0].tolist()}
