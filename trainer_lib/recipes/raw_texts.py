"""Texts as they are, for a model that continues texts: new rows, which no prepare has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.errors import DataError
from trainer_lib.recipes.packed_batches import NO_TARGET, collate_documents

NEW_TOKENS = "new_tokens"
"""The column of new rows that says how many tokens their text is continued by, at most."""


def collate_texts(rows: Sequence[Mapping[str, Any]], tokenizer: Any, info: Mapping[str, Any]) -> dict[str, Tensor]:
    """A batch of texts, which are cut into pieces as those of training are.

    Args:
        rows: the text in the column `info["text"]`, and maybe `new_tokens`.
        tokenizer: as the recipe keeps it.
        info: what prepare noted: `text`, `length` and `overlong`.

    Returns:
        `wanted` ``[rows]``, the tokens that each text is continued by; `row_of` ``[pieces]``, and `input_ids`,
        `attention_mask` and `labels` ``[pieces, tokens]``. Where rows have `new_tokens`, the ends of the texts as well,
        in `prompt_ids` and `prompt_mask` ``[rows, tokens]``, filled up at the beginning.

    Raises:
        DataError: a text is empty, or too long for a row while training refused or dropped such texts; or `new_tokens`
            leaves no room for the text.
    """
    length, end, pad = info["length"], tokenizer.eos_token_id, tokenizer.pad_token_id or 0
    made = tokenizer([row[info["text"]] for row in rows], return_attention_mask=False, verbose=False)["input_ids"]
    bare = [tokens[:-1] if end is not None and tokens[-1:] == [end] else tokens for tokens in made]
    pieces: list[list[int]] = []
    row_of: list[int] = []
    for number, (row, tokens) in enumerate(zip(rows, bare, strict=True)):
        if not row[info["text"]].strip() or not tokens:
            raise _refuse(info["text"], "the text is empty", "Remove the row, or give it a text.")
        whole = tokens if end is None else [*tokens, end]
        if len(whole) > length and info["overlong"] != "split":
            what = f"the text has {len(whole):,} tokens, and a row has at most {length:,}"
            raise _refuse(info["text"], what, "Cut the text; or train with prepare.options.overlong=split.")
        found = [whole[start : start + length] for start in range(0, len(whole), length)]
        pieces += found
        row_of += [number] * len(found)
    wanted = [int(row.get(NEW_TOKENS, 0)) for row in rows]
    batch = {
        "wanted": torch.tensor(wanted),
        "row_of": torch.tensor(row_of),
        **collate_documents([{"input_ids": piece, "lengths": [len(piece)]} for piece in pieces], pad=pad),
    }
    if NEW_TOKENS not in rows[0]:
        return batch
    for number in wanted:
        if not 0 <= number < length:
            what = f"{number:,} is not a number of tokens from 0 on and below the {length:,} that the model reads"
            raise _refuse(NEW_TOKENS, what, "Give another number.")
    room = length - max(wanted)
    ids, mask = batch_prompts([tokens[-room:] for tokens in bare], pad=pad)
    return {**batch, "prompt_ids": ids, "prompt_mask": mask}


def _refuse(column: str, what: str, remedy: str) -> DataError:
    return DataError(f"column '{column}': {what}.", field="rows", value=column, remedy=remedy)


def batch_prompts(prompts: Sequence[Sequence[int]], *, pad: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[texts, tokens]`` that a model continues, filled up at the beginning, and their mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(each)) + list(each) for each in prompts])
    used = torch.tensor(list(map(len, prompts)))
    return ids, (torch.arange(width) >= width - used[:, None]).long()


def continue_prompts(model: Any, ids: Tensor, mask: Tensor, wanted: Tensor, *, pad: int) -> Tensor:
    """New tokens ``[texts, tokens]``, the most likely one each time; behind those that a text should get, -100.

    Args:
        model: a model of transformers that generates.
        ids: ``[texts, tokens]``, with their `mask`, as `batch_prompts` makes them.
        wanted: ``[texts]``, how many tokens each gets, at most.
        pad: the token behind the end of a text.
    """
    most = int(wanted.max())
    if most == 0:
        return torch.full((len(ids), 1), NO_TARGET, device=ids.device)
    made: Tensor = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, use_cache=True, pad_token_id=pad
    )
    new = made[:, ids.shape[1] :]
    return new.masked_fill(torch.arange(new.shape[1], device=ids.device) >= wanted[:, None], NO_TARGET)


def row_likelihoods(model: nn.Module, batch: Mapping[str, Tensor], reduce: Any) -> Tensor:
    """The negative log-likelihood of each text, and its targets ``[rows, 2]``: the sums over its pieces.

    Args:
        batch: as `collate_texts` makes it.
        reduce: what makes ``[pieces, 2]`` of logits and labels.
    """
    rows, row_of = len(batch["wanted"]), batch["row_of"]
    found = torch.zeros(rows, 2, device=row_of.device)
    for start in range(0, len(row_of), rows):  # a long text has many pieces: as many at a time as there are rows
        part = slice(start, start + rows)
        logits = model(input_ids=batch["input_ids"][part], attention_mask=batch["attention_mask"][part])["logits"]
        found.index_add_(0, row_of[part], reduce(logits, batch["labels"][part]).to(found.dtype))
    return found
