"""The recipe preference-optimization: of two answers to a prompt a model learns to prefer one (DPO, ORPO).

    name: polite
    recipe: preference-optimization
    prepare:
      sources: [pairs.jsonl]  # {"prompt": …, "chosen": …, "rejected": …}: texts, or lists of {role, content}
      options: {pretrained: Qwen/Qwen2.5-0.5B-Instruct, max_length: 512}
    train:
      model: {pretrained: Qwen/Qwen2.5-0.5B-Instruct, adapter: {rank: 8}, beta: 0.1}
      args: {num_train_epochs: 1, learning_rate: 5.0e-6, global_batch_size: 16}
    evaluate: {splits: [validation, test]}

Direct Preference Optimization (Rafailov et al., 2023) raises the probability of the chosen answer over that of the
rejected one, each compared to that by the reference: the model that training begins with. What the reference says
prepare computes once and keeps with the rows.

Without `pretrained` or `folder` a byte-level vocabulary is learned from the training texts, and the weights begin at
random by `prepare.options.config` and `seed`.
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
from trainer_lib.recipes.shared.recipe_options import PathOptions, choose, require_choice
from trainer_lib.recipes.tables.rows import FIELD, raise_listed
from trainer_lib.recipes.tables.table_files import SOURCES
from trainer_lib.recipes.texts import answers
from trainer_lib.recipes.texts.tokenizing import decode_tokens

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

NAMES = ["chosen", "rejected"]


class PreferredPairs(answers.AnsweredPrompts):
    """The rows of a table by split: a prompt, the answer that is preferred, and the other one."""

    answer_options = ("chosen", "rejected")
    label_option = "chosen"
    reserved: Sequence[str] = ("labels", "row_id", "reference_chosen", "reference_rejected")
    defaults: Mapping[str, Any] = {
        **answers.ANSWERED,
        **answers.REFERENCE,
        "chosen": "chosen",  # column with the answers that are preferred
        "rejected": "rejected",  # column with the other answers
    }

    @override
    def tokenize(self, texts: Mapping[str, Sequence[str]], out: PrepareOutput) -> dict[str, list[dict[str, Any]]]:
        found, longest, problems = super().tokenize(texts, out), self.options["max_length"], list[DataError]()
        columns = (*found.values(), *(texts[name] for name in NAMES))
        names = " and ".join(f"'{self.options[name]}'" for name in NAMES)
        for place, one, other, chosen, rejected in zip(self.table.places, *columns, strict=True):
            if one["input_ids"] == other["input_ids"] or chosen.strip() == rejected.strip():
                what = f"{place}, columns {names}: the two answers are alike, so none is better"
                remedy = "Remove the row"
                if len(one["input_ids"]) == longest:
                    what = f"{place}: the first {longest:,} tokens are the same for both answers, and the rest is cut"
                    remedy += f", or set a greater {FIELD}.max_length, as far as the model reads it"
                problems.append(DataError(f"{what}.", field=SOURCES, value=chosen[:40], remedy=f"{remedy}."))
        raise_listed(problems)
        return found


# -- losses and metrics -----------------------------------------------------------------------------------------------
# With ``r = log p(y|x) - log p_ref(y|x)``, the logarithm of an answer's probability given its prompt over that of the
# reference, beta r is the answer's implicit reward (Rafailov et al., Direct Preference Optimization, 2023, equation 5
# up to a term of the prompt, which cancels), and the loss is ``-log sigmoid(beta (r_chosen - r_rejected))`` (7).
LOSSES = ("sigmoid", "orpo")


def preference_losses(ratios: Tensor, *, beta: float, loss: str = "sigmoid") -> Tensor:
    """The losses of pairs ``[pairs]``.

    Args:
        ratios: ``[pairs, 2]``, of the chosen and of the rejected answer: the logarithm of its probability less that
            by the reference; for `orpo` the mean over its tokens, without a reference.
        beta: how much a distance from the reference counts; for `orpo` the odds ratio.
        loss: `sigmoid` (Rafailov et al., 2023, equation 7), or `orpo` (Hong et al., Monolithic Preference Optimization
            without Reference Model, 2024, equation 6).
    """
    log_sigmoid = nn.functional.logsigmoid
    if loss == "orpo":
        log_odds = ratios - torch.log(-torch.expm1(ratios.clamp(max=-1e-6)))
        return -ratios[:, 0] - beta * log_sigmoid(log_odds[:, 0] - log_odds[:, 1])
    return -log_sigmoid(beta * (ratios[:, 0] - ratios[:, 1]))


# -- the recipe -------------------------------------------------------------------------------------------------------
def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the pairs, find a tokenizer for them, and ask the reference for the probabilities of their answers.

    Returns:
        For every split its rows: the three texts by the names of their columns, lists of turns as JSON, with
        their `tools` and `system`; `reference_chosen` and `reference_rejected`, the logarithms of the answers'
        probabilities; in `labels` 0, the place of the chosen answer; `row_id`.
    """
    table = PreferredPairs(options, out)
    texts = table.read_texts()
    scores = table.ask_reference(table.tokenize(texts, out), out)
    out.info["classes"] = NAMES
    columns = {table.options[name]: texts[name] for name in texts}
    return table.rows([0] * len(table.table), {**columns, **table.context, **scores})


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the model that the reference is, with adapters on request.

    Raises ConfigError: transformers cannot load it, it is not that of prepare, or a setting has no sense.
    """
    chosen = choose(options, {**answers.POLICY, "loss": "sigmoid"}, field="train.model")  # of DPO; or orpo
    require_choice(chosen["loss"], LOSSES, field="train.model.loss")
    return answers.build_policy(chosen, data, "loss")


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch of `collate_answers`: answers ``[2 rows, tokens]``, the chosen ones first."""
    return answers.collate_answers(rows, data, NAMES)


class Trainer(answers.PolicyTrainer):
    """A Trainer that compares the answers of a pair, and generates one for a prompt that has none."""

    @override
    def judge(self, model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        compared, settings = self.log_probabilities(model, inputs), self.settings
        compared = compared / inputs["lengths"] if self._is_alone else compared - inputs["reference"]
        return preference_losses(compared, **settings), settings["beta"] * compared

    @override
    def compare(self, inputs: Any) -> Tensor:
        reference = super().compare(inputs)
        return reference / inputs["lengths"] if self._is_alone else reference

    @override
    def answer(self, model: nn.Module, inputs: Any) -> Tensor:
        if self._is_alone and "lengths" in inputs:
            means: Tensor = self.log_probabilities(model, inputs) / inputs["lengths"]
            return means * float(self.settings["beta"])
        return super().answer(model, inputs)

    @property
    def _is_alone(self) -> bool:
        """Whether the loss compares means over tokens, and knows no reference."""
        return bool(self.settings["loss"] == "orpo")


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure how often the chosen answer has the higher reward, next to two baselines without training.

    Predictions are rewards ``[rows, 2]``, of the chosen and of the rejected answer; labels have last what is known of
    the answers ``[rows, 4]``: log-probabilities by the reference, which prefers what is more probable, and lengths.
    """
    rewards, known = np.asarray(evaluation.predictions, np.float64), evaluation.label_ids[1]
    shares = map(answers.share_right, (rewards, known[:, :2], known[:, 2:], evaluation.whole_labels[1][:, 2:]))
    chosen, rejected = map(float, rewards.mean(axis=0))
    means = {"reward_margin": chosen - rejected, "chosen_reward": chosen, "rejected_reward": rejected}
    return {**answers.beside_rules("accuracy", *shares), **means}


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn rewards ``[rows, 2]`` into the answer that is preferred and how surely, or tokens into a new answer."""
    if predictions.dtype.kind in "iu":
        return {"prediction": decode_tokens(predictions, data)}
    margins = predictions[:, 0].astype(np.float64) - predictions[:, 1]
    return {
        "prediction": [NAMES[int(margin < 0)] for margin in margins.tolist()],
        "probability": 1 / (1 + np.exp(-np.abs(margins))),
        "margin": margins,
        "chosen_reward": predictions[:, 0].astype(np.float64),
        "rejected_reward": predictions[:, 1].astype(np.float64),
    }
