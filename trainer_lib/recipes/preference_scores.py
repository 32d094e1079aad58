"""Losses and metrics of preferences: what a model says of two answers, next to what it thought before its training.

With ``r = log p(y|x) - log p_ref(y|x)``, the logarithm of an answer's probability given its prompt over that of the
reference, beta r is the answer's implicit reward (Rafailov et al., Direct Preference Optimization, 2023, equation 5 up
to a term of the prompt, which cancels), and the loss is ``-log sigmoid(beta (r_chosen - r_rejected))`` (equation 7).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LOSSES = ("sigmoid", "ipo")


def log_probabilities(logits: Tensor, tokens: Tensor, is_answer: Tensor) -> Tensor:
    """The logarithm of each answer's probability ``[texts]``: the sum over its tokens, given all before them.

    Args:
        logits: ``[texts, tokens, vocabulary]``.
        tokens: ``[texts, tokens]``.
        is_answer: ``[texts, tokens]``, true where a token is of the answer; never at the first place.
    """
    scores = logits[:, :-1].transpose(1, 2).float()
    nats = nn.functional.cross_entropy(scores, tokens[:, 1:], reduction="none")
    return -(nats * is_answer[:, 1:]).sum(dim=1)


def preference_losses(ratios: Tensor, *, beta: float, loss: str = "sigmoid", label_smoothing: float = 0.0) -> Tensor:
    """The loss of each pair ``[pairs]``.

    Args:
        ratios: ``[pairs, 2]``, of the chosen and of the rejected answer: the logarithm of its probability less that
            by the reference.
        beta: how much a distance from the reference counts.
        loss: `sigmoid` (Rafailov et al., 2023, equation 7), or `ipo`, the square of the distance to 1 / (2 beta) (Azar
            et al., A General Theoretical Paradigm to Understand Learning from Human Preferences, 2023, equation 17).
        label_smoothing: the share of pairs that are thought to be the wrong way round (`sigmoid` alone).
    """
    margins = ratios[:, 0] - ratios[:, 1]
    if loss == "ipo":
        return (margins - 1 / (2 * beta)) ** 2
    log_sigmoid = nn.functional.logsigmoid
    right, wrong = log_sigmoid(beta * margins), log_sigmoid(-beta * margins)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def with_lengths(reference: Tensor, is_answer: Tensor) -> Tensor:
    """What is known of each pair without the model ``[pairs, 4]``: log-probabilities by the reference, and lengths.

    Args:
        reference: ``[pairs, 2]``.
        is_answer: ``[2 pairs, tokens]``, the chosen answers first.
    """
    return torch.cat((reference.double(), torch.stack(is_answer.sum(dim=1).chunk(2), dim=1).double()), dim=1)


def measure_preferences(rewards: np.ndarray, known: np.ndarray, whole: np.ndarray | None = None) -> dict[str, float]:
    """How often the chosen answer has the higher reward, beside two ways to tell them apart without training.

    These are the reference, which prefers what it thinks is more probable, and the lengths of answers: always the
    longer one, or always the shorter one, whichever is right more often for these very rows. A tie is half right.

    Args:
        rewards: ``[rows, 2]``, of the chosen and of the rejected answer.
        known: ``[rows, 4]``, as `with_lengths` makes it.
        whole: where these rows are a resample, what is known of all rows: it says whether the longer one counts.
    """
    margins, others = rewards[:, 0] - rewards[:, 1], np.asarray(known, np.float64)
    every = others if whole is None else np.asarray(whole, np.float64)
    accuracy, reference, longer = (
        _share_right(each) for each in (margins, others[:, 0] - others[:, 1], others[:, 2] - others[:, 3])
    )
    length = longer if _share_right(every[:, 2] - every[:, 3]) >= 0.5 else 1 - longer
    return {
        "accuracy": accuracy,
        "reward_margin": float(margins.mean()),
        "chosen_reward": float(rewards[:, 0].mean()),
        "rejected_reward": float(rewards[:, 1].mean()),
        "reference_accuracy": reference,
        "length_accuracy": length,
        "accuracy_over_reference": accuracy - reference,
        "accuracy_over_length": accuracy - length,
    }


def _share_right(margins: Any) -> float:
    return float(((margins > 0) + 0.5 * (margins == 0)).mean())
