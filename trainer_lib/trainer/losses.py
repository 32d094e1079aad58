"""Losses: read from a model's outputs or computed with smoothed labels; and the noise of NEFTune."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib.data.collators import IGNORED
from trainer_lib.errors import ConfigError


class LabelSmoother:
    """Label-smoothed cross-entropy over the logits, mean over the labels that are not -100.

    Source: Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def __call__(
        self,
        model_output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """The loss, 0-dim, of ``logits [..., classes]`` against ``labels [...]``.

        Args:
            model_output: the model's outputs; logits under "logits", or first.
            labels: target classes; -100 is ignored.
            shift_labels: position t is compared with label t + 1.
            num_items_in_batch: the sum of the losses is divided by this number; else by the number of labels.
        """
        logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        flat = logits.reshape(-1, logits.shape[-1])
        # In float32: in 16 bits, a sum over tens of thousands of classes loses its last digits.
        loss = nn.functional.cross_entropy(
            *(flat.float(), labels.reshape(-1)),
            ignore_index=IGNORED,
            label_smoothing=self.epsilon,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def loss_of(outputs: Any, inputs: Any) -> torch.Tensor:
    """The loss in a model's outputs, ``[]``: under "loss" in a mapping, else the first element.

    Raises:
        ConfigError: the outputs hold no loss; the message names what they hold.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(outputs, Mapping):
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs[0] if len(outputs) else None
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(()) if loss.ndim else loss  # some models return `[1]`
    given = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
    if isinstance(outputs, Mapping):
        got = "only " + ", ".join(map(str, outputs))
    else:
        got = f"a tensor of shape {tuple(loss.shape)} first" if isinstance(loss, torch.Tensor) else "none"
    raise ConfigError(
        f"The model returned no loss but {got}; it was given {given}.",
        field="model",
        remedy="Return the loss first when labels are given (and give labels), or pass compute_loss_func.",
    )


def neftune_hook(alpha: float) -> Any:
    """A forward hook that adds uniform noise to an embedding while training.

    Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (https://arxiv.org/abs/2310.05914).
    """

    def add_noise(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        bound = alpha / (output.shape[-2] * output.shape[-1]) ** 0.5  # alpha / sqrt(tokens * width)
        return output + torch.zeros_like(output).uniform_(-bound, bound)

    return add_noise
