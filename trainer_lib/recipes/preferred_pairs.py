"""Prompts with two answers of which one is preferred: read from tables, as tokens, and as the reference sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from trainer_lib.errors import DataError
from trainer_lib.recipes.answered_questions import read_context
from trainer_lib.recipes.paired_texts import COMMON, PairedTexts
from trainer_lib.recipes.preference_scores import log_probabilities
from trainer_lib.recipes.table_files import SOURCES, Reader
from trainer_lib.recipes.tabular_rows import FIELD

DEFAULTS: dict[str, Any] = {
    **COMMON,
    "prompt": "prompt",
    "chosen": "chosen",
    "rejected": "rejected",
    "max_length": 512,
    "config": {},
    "seed": 0,
    "dtype": "float32",
}
"""Every option of `prepare`, with its default."""
OWN = ("labels", "row_id", "reference_chosen", "reference_rejected")
"""The columns that the recipe adds."""


class Answer(NamedTuple):
    """A prompt with an answer, as tokens; the answer begins at `start`."""

    tokens: list[int]
    start: int


class PreferredPairs(PairedTexts):
    """The rows of a table by split: a prompt, the answer that is preferred, and the other one."""

    text_option = "prompt"
    label_option = "chosen"
    reserved = OWN
    defaults: Mapping[str, Any] = DEFAULTS

    @override
    def _readers(self) -> Mapping[str, Reader]:
        # As they are: spaces at their ends are tokens, too.
        return {self.options[name]: read_context for name in ("prompt", "chosen", "rejected")}

    @override
    def _text_options(self) -> tuple[str, ...]:
        return ("prompt", "chosen", "rejected")

    def answers(self, tokenizer: Any) -> tuple[list[Answer], list[Answer], int]:
        """The chosen and the rejected answer of each row, and how many of them are cut.

        Raises:
            DataError: the answers of a row are alike, or its prompt leaves no room for them.
        """
        names = [self.options[name] for name in self._text_options()]
        prompts, chosen, rejected = (self.table.columns[name] for name in names)
        longest = self.options["max_length"]
        for place, one, other in zip(self.table.places, chosen, rejected, strict=True):
            if one.strip() == other.strip():
                what = f"{place}, columns '{names[1]}' and '{names[2]}': the two answers are alike, so none is better"
                raise DataError(f"{what}: '{one[:40]}'.", field=SOURCES, remedy="Remove the row.")
        tokens = prompt_tokens(prompts, tokenizer)
        for place, each in zip(self.table.places, tokens, strict=True):
            if len(each) >= longest:
                raise DataError(
                    f"{place}, column '{names[0]}': the prompt has {len(each):,} tokens of at most {longest:,}, which "
                    "leaves no room for an answer.",
                    field=f"{FIELD}.max_length",
                    value=longest,
                    remedy="Shorten the prompt, or set a greater max_length, as far as the model reads it.",
                )
        found = [answer_tokens(tokens, answers, tokenizer, longest=longest) for answers in (chosen, rejected)]
        for place, one, other in zip(self.table.places, *(answers for answers, _ in found), strict=True):
            if one.tokens == other.tokens:
                raise DataError(
                    f"{place}: the first {longest:,} tokens of prompt and answer are the same for both answers, and "
                    "the rest is cut.",
                    field=f"{FIELD}.max_length",
                    value=longest,
                    remedy="Remove the row, or set a greater max_length, as far as the model reads it.",
                )
        return found[0][0], found[1][0], found[0][1] + found[1][1]


def prompt_tokens(prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of prompts, as the tokenizer makes them of a text that goes on."""
    if not prompts:
        return []
    end = tokenizer.eos_token_id
    made = tokenizer(list(prompts), verbose=False)["input_ids"]
    return [tokens[:-1] if end is not None and len(tokens) > 1 and tokens[-1] == end else tokens for tokens in made]


def answer_tokens(
    prompts: Sequence[list[int]], answers: Sequence[str], tokenizer: Any, *, longest: int
) -> tuple[list[Answer], int]:
    """Prompts and their answers, each with the token for the end, of at most `longest` tokens; how many are cut."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    made = tokenizer(list(answers), add_special_tokens=False, verbose=False)["input_ids"]
    whole = [[*prompt, *tokens, *end] for prompt, tokens in zip(prompts, made, strict=True)]
    found = [Answer(tokens[:longest], len(prompt)) for prompt, tokens in zip(prompts, whole, strict=True)]
    return found, sum(len(tokens) > longest for tokens in whole)


def batch_answers(answers: Sequence[Answer], *, pad: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `is_answer` ``[answers, tokens]``, filled up at the end."""
    size = (len(answers), max(len(each.tokens) for each in answers))
    batch = {"input_ids": torch.full(size, pad), "attention_mask": torch.zeros(size, dtype=torch.long)}
    batch["is_answer"] = torch.zeros(size, dtype=torch.bool)
    for row, (tokens, start) in enumerate(answers):
        batch["input_ids"][row, : len(tokens)] = torch.tensor(tokens)
        batch["attention_mask"][row, : len(tokens)] = 1
        batch["is_answer"][row, start : len(tokens)] = True
    return batch


def score_answers(model: Any, answers: Sequence[Answer], *, pad: int, together: int = 16) -> np.ndarray:
    """The logarithm of each answer's probability by a model, float64 ``[answers]``; on a GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device).eval()
    order = sorted(range(len(answers)), key=lambda row: -len(answers[row].tokens))  # little padding
    found = np.empty(len(answers))
    with torch.no_grad():
        for rows in _in_parts(order, together):
            batch = {name: each.to(device) for name, each in
                     batch_answers([answers[row] for row in rows], pad=pad).items()}  # fmt: skip
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
            found[rows] = log_probabilities(logits, batch["input_ids"], batch["is_answer"]).double().cpu().numpy()
    return found


def _in_parts(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]
