"""The loss by source of a mixture, summed over tokens on the device and read where the loss is logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trainer_lib.data.loading.loader import is_pure_collator
from trainer_lib.data.rows.mixture import SOURCE

KEY = "mixture_source"
"""The tensor of a training batch with the number of the source of each label, int64 in the shape of the labels."""
_LABELS = "labels"
_NO_TARGET = -100
_TOGETHER = 1024  # tokens whose loss is computed at once: a row of scores for each is as long as the vocabulary


class WithSources:
    """A collator that adds the sources of rows, which `SOURCE` names and `names` numbers, to batches with labels."""

    def __init__(self, collate: Callable[[list[Any]], Any], names: Sequence[str]) -> None:
        self.collate = collate
        self.is_pure = is_pure_collator(collate)
        self._numbers = {name: number for number, name in enumerate(names)}

    def __call__(self, samples: list[Any]) -> Any:
        """The batch, with the sources of its labels."""
        batch = self.collate(samples)
        labels = batch.get(_LABELS) if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or len(labels) != len(samples):
            return batch
        numbers = torch.tensor([self._numbers[sample[SOURCE]] for sample in samples])
        shaped = numbers.view(-1, *(1 for _ in labels.shape[1:])).expand_as(labels).contiguous()
        return {**batch, KEY: shaped}


def take_sources(batch: Any) -> tuple[Any, Tensor | None]:
    """A batch as the model takes it, and the sources of its labels, int64 in their shape ``[batch, …]``."""
    if not isinstance(batch, Mapping) or KEY not in batch:
        return batch, None
    return {name: value for name, value in batch.items() if name != KEY}, batch[KEY]


class SourceLosses:
    """Losses and targets by source since the last log."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._sums: Tensor | None = None  # [losses and targets, sources] that are not collected yet
        self._collected = [[0.0] * len(self.names) for _ in range(2)]

    @torch.no_grad()
    def add(self, outputs: Any, labels: Any, sources: Tensor, *, shifts: bool) -> None:
        """Add the losses of a micro-batch, unless its outputs have no `logits` ``[…, classes]`` for the labels.

        Labels and numbers of sources are int64 ``[…]``; `shifts`: a token is compared with the scores before it.
        """
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        if logits.shape[:-1] != labels.shape:
            return
        sources = sources.to(logits.device, non_blocking=True)
        numbers = torch.arange(len(self.names), device=logits.device)[:, None]
        rows = zip(logits, labels, sources, strict=True) if labels.ndim > 1 else [(logits, labels, sources)]
        for scores, targets, source in rows:
            if shifts and labels.ndim > 1:
                scores, targets, source = scores[:-1], targets[1:], source[1:]
            for start in range(0, len(targets), _TOGETHER):
                part = slice(start, start + _TOGETHER)
                self._add_part(scores[part], targets[part], source[part] == numbers)

    def _add_part(self, scores: Tensor, targets: Tensor, belongs: Tensor) -> None:
        losses = cross_entropy(scores.float(), targets, ignore_index=_NO_TARGET, reduction="none")
        counts = (targets != _NO_TARGET) & losses.isfinite()  # a loss that is not finite is counted by the history
        # Summed by rows, and not scattered: on a GPU that adds in another order each time.
        both = torch.stack([torch.where(belongs & counts, value, 0.0).sum(1) for value in (losses, counts.float())])
        self._sums = both if self._sums is None else self._sums + both

    def collect(self, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Bring the sums ``[2, sources]`` to the host. Collective: `total` adds a tensor up over ranks."""
        sums = torch.zeros(2, len(self.names), device=device) if self._sums is None else self._sums
        self._sums = None
        for collected, new in zip(self._collected, total(sums).tolist(), strict=True):
            collected[:] = map(sum, zip(collected, new, strict=True))

    def take(self) -> dict[str, float]:
        """`loss_<source>` of those with targets since the last call; call after `collect`."""
        losses, targets = self._collected
        self._collected = [[0.0] * len(self.names) for _ in range(2)]
        pairs = zip(self.names, losses, targets, strict=True)
        return {f"loss_{name}": loss / count for name, loss, count in pairs if count}

    def state(self) -> list[list[float]]:
        """As JSON; call after `collect`."""
        return self._collected

    def load_state(self, state: Any) -> None:
        """Restore what `state` returned."""
        self._collected = [[float(value) for value in row] for row in state]
