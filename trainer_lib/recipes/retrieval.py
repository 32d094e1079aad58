"""Ranks of the texts that belong to queries, among all candidates: by a model, and by the tokens in common.

The rank of a row does not depend on which other rows are measured with it. So a resample of rows, or a slice, is
measured against the same candidates as all of them; among its own it would have fewer, and better ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_RANKS = (1, 5, 10)
_AT_ONCE = 64  # rows of a matrix of scores


def find_ranks(scores: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The rank from 1 of the candidate ``right[row]`` by scores ``[rows, candidates]``; of ties the mean."""
    own = scores[np.arange(len(scores)), right][:, None]
    higher, equal = (scores > own).sum(axis=1), (scores == own).sum(axis=1)
    found: np.ndarray = higher + (equal + 1) / 2
    return found


class Candidates:
    """The texts among which those that belong to queries are found.

    Args:
        batches: batches of a split, as `collate` makes them; queries first, then what belongs to them.
        embed: what makes embeddings ``[texts, size]`` of `input_ids` and `attention_mask` ``[texts, tokens]``.

    Attributes:
        embeddings: ``[candidates, size]``.
        overlap: place of a row -> the rank of what belongs to it by the tokens in common.
    """

    def __init__(self, batches: Iterable[Any], embed: Callable[[Any], Tensor]) -> None:
        self._number: dict[int, int] = {}
        made: list[Tensor] = []
        tokens: list[np.ndarray] = []
        queries: list[np.ndarray] = []
        rights: list[int] = []
        places: list[int] = []
        for batch in batches:
            rows = len(batch["labels"])
            labels = batch["labels"].tolist()
            new = [row for row, label in enumerate(labels) if label not in self._number]
            new = [row for row in new if labels.index(labels[row]) == row]
            for row in new:
                self._number[labels[row]] = len(self._number)
            queries += _token_sets(batch, range(rows))
            tokens += _token_sets(batch, [rows + row for row in new])
            rights += [self._number[label] for label in labels]
            places += batch["places"].tolist()
            if new:
                chosen = rows + torch.tensor(new, device=batch["input_ids"].device)
                made.append(embed({name: batch[name][chosen] for name in ("input_ids", "attention_mask")}))
        self.embeddings = torch.cat(made)
        ranks = _overlap_ranks(queries, tokens, np.array(rights))
        self.overlap = dict(zip(places, ranks.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._number)

    def rights(self, labels: Tensor) -> Tensor:
        """The number of the candidate of each row ``[rows]``, given its label."""
        return torch.tensor([self._number[label] for label in labels.tolist()], device=labels.device)


def _token_sets(batch: Any, sequences: Iterable[int]) -> list[np.ndarray]:
    ids, mask = batch["input_ids"].cpu().numpy(), batch["attention_mask"].cpu().numpy()
    return [np.unique(ids[each][mask[each] > 0]) for each in sequences]


def _overlap_ranks(queries: Sequence[np.ndarray], candidates: Sequence[np.ndarray], rights: np.ndarray) -> np.ndarray:
    """The ranks by the number of tokens in common, divided by the root of those that the candidate has."""
    size = 1 + max(int(each.max(initial=0)) for each in (*queries, *candidates))
    own, other = _matrix(queries, size), _matrix(candidates, size)
    lengths = np.sqrt(np.maximum(1, np.array([len(each) for each in candidates])))
    found = [np.zeros(0)]
    for start in range(0, len(queries), _AT_ONCE):
        scores = (own[start : start + _AT_ONCE] @ other.T).toarray() / lengths
        found.append(find_ranks(scores, rights[start : start + _AT_ONCE]))
    return np.concatenate(found)


def _matrix(sets: Sequence[np.ndarray], size: int) -> Any:
    from scipy import sparse

    ends = np.cumsum([0, *map(len, sets)])
    return sparse.csr_matrix((np.ones(ends[-1]), np.concatenate([*sets, np.zeros(0, int)]), ends), (len(sets), size))


def in_batches(rows: Any, size: int) -> Iterator[list[Any]]:
    """The rows of a data set, some at a time."""
    for start in range(0, len(rows), size):
        yield [rows[row] for row in range(start, min(start + size, len(rows)))]


def measure_ranks(ranks: np.ndarray, overlap: np.ndarray, candidates: np.ndarray) -> dict[str, float]:
    """Mean reciprocal rank and recall of ranks ``[rows]``, beside the ranks by tokens in common, and chance.

    `mrr_over_overlap` is what the model is better by.
    """
    own, other = (1 / np.asarray(each, np.float64) for each in (ranks, overlap))
    return {
        "mrr": float(own.mean()),
        **{f"recall_at_{most}": float((ranks <= most).mean()) for most in _MOST_RANKS},
        "overlap_mrr": float(other.mean()),
        **{f"overlap_recall_at_{most}": float((overlap <= most).mean()) for most in _MOST_RANKS},
        "mrr_over_overlap": float(own.mean() - other.mean()),
        "chance_recall_at_10": float(np.minimum(1, 10 / candidates).mean()),
        "candidates": float(candidates.max()),
    }
