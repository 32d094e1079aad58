"""Answers to a fixed list of prompts: by the model, and by the model as it was before training; which are right.

Both are compared prompt by prompt, by the exact test of McNemar, which is binomial over the prompts where only one is
right. Intervals hold 95 %: Wilson's for a share, from resamples of the prompts for a difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from trainer_lib.errors import ConfigError
from trainer_lib.recipes.shared.model_places import as_it_began
from trainer_lib.recipes.shared.recipe_options import choose, require_choice
from trainer_lib.recipes.texts.packed_batches import generate

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo

FIELD = "evaluate.options"
FILE = "prompts.json"
"""Prompts with their answers, among the files of evaluate."""
_DEFAULTS: dict[str, Any] = {
    "prompts": [],  # texts; or {prompt, answer}, with the expected text, or several of them
    "sample_tokens": 64,  # the most tokens of an answer
    "before": True,  # whether the model as it was before training answers as well
    "judge": "equal",  # when an answer is right: equal to an expected one, or contains it
}
_RESAMPLES = 2000
_SHOWN_CHARACTERS = 2000


@dataclass(frozen=True)
class Prompt:
    """A question, and the answers that are expected; none: not judged."""

    text: str
    expected: tuple[str, ...] = ()

    @classmethod
    def read(cls, entry: object) -> Prompt:
        """A prompt of the spec. Raises ConfigError: it is neither a text nor a text with what is expected."""
        given = {"prompt": entry} if isinstance(entry, str) else entry
        if (
            isinstance(given, Mapping)
            and isinstance(given.get("prompt"), str)
            and not set(given) - {"prompt", "answer"}
        ):
            answers = given.get("answer", [])
            expected = [answers] if isinstance(answers, str) else answers
            if isinstance(expected, list) and all(isinstance(text, str) and text.strip() for text in expected):
                return cls(given["prompt"], tuple(expected))
        what = "This is not a prompt."
        remedy = "Give a text, or {prompt: a text, answer: a text or a list of texts}."
        raise ConfigError(what, field=f"{FIELD}.prompts", value=entry, remedy=remedy)

    def judge(self, answer: str, way: str) -> bool | None:
        """Whether an answer is right; None: not judged. Case, blanks and the full stop at the end do not count."""
        plain, *texts = (" ".join(text.casefold().split()).rstrip(".") for text in (answer, *self.expected))
        return any(text == plain if way == "equal" else text in plain for text in texts) if texts else None


def answer_prompts(
    model: nn.Module, tokenizer: Any, ask: Callable[[str], Sequence[int]], data: DataInfo, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Answer `evaluate.options.prompts`: what `after_evaluate` returns. `ask` makes the tokens of a prompt.

    Raises ConfigError: an option is wrong, or a prompt and its answer exceed the `length` of the data.
    """
    chosen = choose(options, _DEFAULTS, field=FIELD)
    require_choice(chosen["judge"], ("equal", "contains"), field=f"{FIELD}.judge")
    prompts = [Prompt.read(entry) for entry in chosen["prompts"]]
    if not prompts:
        return {}
    asked = [ask(prompt.text) for prompt in prompts]
    most = max(data.info["length"], getattr(getattr(model, "config", None), "max_position_embeddings", None) or 0)
    for prompt, tokens in zip(prompts, asked, strict=True):
        if not tokens or not 0 < chosen["sample_tokens"] <= most - len(tokens):
            what = f"{len(tokens):,} tokens and {chosen['sample_tokens']:,} new ones do not fit {most:,}."
            remedy = "Shorten it, or set sample_tokens."
            raise ConfigError(what, field=f"{FIELD}.prompts", value=prompt.text[:200], remedy=remedy)
    now = _measure(model, prompts, asked, tokenizer, chosen)
    before, first = None, data.build_first
    if chosen["before"] and (first is not None or hasattr(model, "disable_adapter")):
        device = next(model.parameters()).device
        with as_it_began(model, lambda: first().to(device).eval() if first else model) as began:
            before = _measure(began, prompts, asked, tokenizer, chosen)
    return {"metrics": dict(_compare(now, before)), "files": _write(prompts, now, before)}


_Measured = tuple[list[str], list[bool | None]]
"""Answers to all prompts, and of those with an expected answer whether it is right."""


def _measure(
    model: Any, prompts: Sequence[Prompt], asked: Sequence[Sequence[int]], tokenizer: Any, chosen: Mapping[str, Any]
) -> _Measured:
    made = generate(model, asked, chosen["sample_tokens"])
    answers = tokenizer.batch_decode(made, skip_special_tokens=True)
    return answers, [prompt.judge(answer, chosen["judge"]) for prompt, answer in zip(prompts, answers, strict=True)]


def _compare(now: _Measured, before: _Measured | None) -> Iterator[tuple[str, float]]:
    """Metrics of the judged prompts; with the model before training, the difference and the test of it."""
    from scipy.stats import binomtest

    right = np.array([value for value in now[1] if value is not None], float)
    if not len(right):
        return
    interval = binomtest(int(right.sum()), len(right)).proportion_ci(0.95, method="wilson")
    yield "answers_right", float(right.mean())
    yield "answers_right_low", float(interval.low)
    yield "answers_right_high", float(interval.high)
    if before is None:
        return
    earlier = np.array([value for value in before[1] if value is not None], float)
    gained, lost = int((right > earlier).sum()), int((right < earlier).sum())
    yield "answers_right_before", float(earlier.mean())
    differences = right - earlier
    chosen = np.random.default_rng(0).integers(len(differences), size=(_RESAMPLES, len(differences)))
    low, high = np.quantile(differences[chosen].mean(axis=1), (0.025, 0.975))
    yield "answers_gain", float(differences.mean())
    yield "answers_gain_low", float(low)
    yield "answers_gain_high", float(high)
    yield "answers_gain_p", float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def _write(prompts: Sequence[Prompt], now: _Measured, before: _Measured | None) -> dict[str, bytes]:
    """The answers side by side: `samples.txt` for people, `prompts.json` for the report and MLflow."""
    form = "{prompt}\n\n{answer}" if before is None else "{prompt}\n\nbefore: {before}\n\nafter:  {after}"
    rows: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        answers = {"answer": now[0]} if before is None else {"before": before[0], "after": now[0]}
        texts = {"prompt": prompt.text, **{name: made[number] for name, made in answers.items()}}
        if any(other.expected for other in prompts):
            texts["expected"] = " | ".join(prompt.expected)
        row: dict[str, Any] = {name: text[:_SHOWN_CHARACTERS] for name, text in texts.items()}
        rows.append(row | ({"right": now[1][number]} if "expected" in row else {}))
    text = ("\n" + "-" * 80 + "\n").join(form.format(**row) for row in rows)
    return {"samples.txt": text.encode(), FILE: json.dumps(rows).encode()}
