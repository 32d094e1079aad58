"""Sources that are trained on together: their rows, and the weights by which they are mixed. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer_lib.base.suggestions import require_known
from trainer_lib.errors import ConfigError, DataError

FIELD = "prepare.mixture"
INFO = "mixture"  # name of what prepare notes about a mixture
SOURCE = "source"  # the column of prepared rows with the name of their source


class Piece(NamedTuple):
    """Weights by source, not negative, from an optimizer step on; sources that are not named keep theirs."""

    step: int
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Mixture:
    """The sources of a split in the order of its rows, and how they are mixed."""

    rows: Mapping[str, int]  # name of a source -> its rows, which follow those of the source before
    # Name -> the rows that it may give in an epoch; the others give what their weights ask for.
    budgets: Mapping[str, int]
    pieces: Sequence[Piece]  # weights by step, the first at step 0 and of all sources

    @property
    def epoch_rows(self) -> int:
        """Positions of an epoch: the budgets, and the sizes of sources without one."""
        return sum(self.budgets.get(name, rows) for name, rows in self.rows.items())

    @classmethod
    def of(cls, info: Mapping[str, Any], split: str) -> Mixture:
        """The mixture of a split.

        Args:
            info: what prepare counted (`rows` and `tokens`: split -> name -> count), and the settings of the spec
                (`sources`, with `name`, `weight`, `epochs` and `tokens`; `temperature`; `schedule`, pairs of step
                and weights).

        Raises:
            ConfigError: a source is unknown or has no rows, tokens were not counted, or no weight is above zero.
        """
        if split not in info.get("rows", {}):
            what = f"The rows of the split '{split}' were not counted by source."
            raise ConfigError(what, field=FIELD, value=split, remedy="Run with --force prepare.")
        rows = {str(name): int(count) for name, count in info["rows"][split].items()}
        entries = {entry["name"]: entry for entry in info["sources"]}
        if empty := [name for name in entries if not rows.get(name)]:
            what = f"The source '{empty[0]}' has no rows in the split '{split}'."
            raise ConfigError(what, field=FIELD, value=empty[0], remedy="Check the source and the split, or remove it.")
        budgets = {name: budget for name, entry in entries.items() if (budget := _budget(info, split, entry))}
        if all(entry["weight"] is not None for entry in entries.values()):
            weights = {name: float(entry["weight"]) for name, entry in entries.items()}
        else:
            power = 1 / float(info["temperature"])
            weights = {name: budgets.get(name, count) ** power for name, count in rows.items()}
        later = [Piece(step, asked) for step, asked in info["schedule"]]
        return cls(rows, budgets, [Piece(0, _shares(weights, field=FIELD)), *later])


def _budget(info: Mapping[str, Any], split: str, entry: Mapping[str, Any]) -> int | None:
    """The rows that a source may give in an epoch; None: as many as its weight asks for."""
    name = entry["name"]
    rows = int(info["rows"][split][name])
    if entry["epochs"] is not None:
        return max(1, round(rows * float(entry["epochs"])))
    if entry["tokens"] is None:
        return None
    tokens = int(info["tokens"][split].get(name, 0))
    if not tokens:
        what, remedy = "The rows of this recipe have no tokens that could be counted.", "Give epochs in place of it."
        raise ConfigError(what, field=f"{FIELD}.tokens", value=entry["tokens"], remedy=remedy)
    return max(1, round(int(entry["tokens"]) * rows / tokens))


def count_sources(
    rows: Iterable[Mapping[str, Any]], names: Sequence[str], split: str, info: dict[str, Any], limit: int | None = None
) -> Iterator[Mapping[str, Any]]:
    """The rows of a split, at most `limit` of a source; counts them and their tokens into `info` for `Mixture.of`.

    Raises DataError for a row without a source of the mixture, or behind a row of a later one.
    """
    counts, tokens = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    known = info.setdefault(INFO, {"rows": {}, "tokens": {}})
    known["rows"][split], known["tokens"][split] = counts, tokens
    last = 0
    for number, row in enumerate(rows):
        name = str(row.get(SOURCE))
        place = names.index(name) if name in counts else -1
        if place < last:
            what = "names no source of the mixture" if place < 0 else f"stands behind one of '{names[last]}'"
            remedy = "Mix with supervised-fine-tuning or causal-language-modeling; or give rows a column "
            remedy += f"'{SOURCE}' with a name of out.mixture, those of the first one first."
            raise DataError(f"Row {number:,} of '{split}' {what}.", field=FIELD, value=row.get(SOURCE), remedy=remedy)
        last = place
        if counts[name] == limit:
            if place == len(names) - 1:
                return
            continue
        counts[name] += 1
        tokens[name] += len(row.get("input_ids", ()))
        yield row


def merge_weights(known: Mapping[str, float], asked: Mapping[str, float], *, field: str) -> dict[str, float]:
    """The weights after a change, which keeps those of other sources. Raises ConfigError for wrong weights."""
    for name, weight in asked.items():
        require_known(name, known, "The mixture has no such source.", field=field)
        if not 0 <= weight < float("inf"):
            what, remedy = "This is not a weight.", "Give a number from 0 on."
            raise ConfigError(what, field=f"{field}.{name}", value=weight, remedy=remedy)
    return _shares({**known, **asked}, field=field)


def _shares(weights: Mapping[str, float], *, field: str) -> dict[str, float]:
    total = sum(weights.values())
    if total <= 0:
        what, remedy = "No source has a weight above 0.", "Give one to a source at least."
        raise ConfigError(what, field=field, value=dict(weights), remedy=remedy)
    return {name: weight / total for name, weight in weights.items()}
