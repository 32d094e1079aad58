"""Batches for models that continue texts: packed rows, in which no document sees another one; new texts.

`require_isolation` tries whether a model keeps documents apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_lib.errors import ConfigError, DataError, first_line
from trainer_lib.recipes.shared.recipe_options import require_choice

FIELD = "prepare.options.isolate"
WAYS = ("positions", "mask")
"""Ways to keep documents of a row apart.

positions: `position_ids` begin again at 0 with every document. transformers makes a block-diagonal mask of them.
mask: the block-diagonal mask is given as well, for a model that takes one and does not make it.
"""
NO_TARGET = -100
NEW_TOKENS = "new_tokens"
"""The column of new rows that says how many tokens their text is continued by, at most."""
_TOGETHER = 16  # prompts that a model continues at once
_TOLERANCE = 0.02  # of the largest logit: positions are rounded, and half precision has three digits


def require_rows(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options `isolate` and `length` that no rows can have."""
    require_choice(options["isolate"], WAYS, field=FIELD)
    if options["length"] < 2:
        what = "A row needs two tokens, because the first one is not predicted."
        raise ConfigError(what, field="prepare.options.length", value=options["length"], remedy="Give 2 or more.")


def collate_rows(rows: Sequence[Mapping[str, Any]], info: Mapping[str, Any]) -> dict[str, Tensor]:
    """A batch ``[batch, tokens]``: of `collate_packed` where a row has several documents, else `collate_documents`."""
    pad = info["ends"]["pad_token_id"] or 0  # is never a target
    if any(len(row["lengths"]) > 1 for row in rows):
        return collate_packed(rows, pad=pad, isolate=info["isolate"])
    return collate_documents(rows, pad=pad)


def collate_packed(rows: Sequence[Mapping[str, Any]], *, pad: int, isolate: str) -> dict[str, Tensor]:
    """A batch of packed rows. Shapes are ``[batch, tokens]``, where the longest row decides.

    A document's first token is not a target: what stands in front of it is another document. Padding is a document of
    its own, without targets.

    Args:
        rows: with `input_ids`, `lengths` and perhaps `trained`, as `pack_documents` gives them.
        pad: the token that fills up short rows.
        isolate: one of `WAYS`.

    Returns:
        `input_ids`, `position_ids`, `labels`, and with "mask" `attention_mask` bool ``[batch, 1, tokens, tokens]``,
        True where a token (third dimension) sees one (fourth dimension).
    """
    longest = max(len(row["input_ids"]) for row in rows)
    tokens = np.full((len(rows), longest), pad, np.int64)
    labels = np.full((len(rows), longest), NO_TARGET, np.int64)
    positions = np.empty((len(rows), longest), np.int64)
    documents = np.empty((len(rows), longest), np.int64)
    for place, row in enumerate(rows):
        used = len(row["input_ids"])
        tokens[place, :used] = labels[place, :used] = row["input_ids"]
        lengths = np.append(row["lengths"], longest - used)
        starts = np.cumsum(lengths) - lengths
        documents[place] = np.repeat(np.arange(len(lengths)), lengths)
        positions[place] = np.arange(longest) - starts[documents[place]]
        labels[place, starts[:-1]] = NO_TARGET
        if "trained" in row:
            labels[place, :used][~np.asarray(row["trained"], bool)] = NO_TARGET
    batch = {name: torch.from_numpy(array) for name, array in
             (("input_ids", tokens), ("position_ids", positions), ("labels", labels))}  # fmt: skip
    if isolate == "mask":
        numbers, causal = torch.from_numpy(documents), torch.ones(longest, longest, dtype=torch.bool).tril()
        batch["attention_mask"] = ((numbers[:, :, None] == numbers[:, None, :]) & causal)[:, None]
    return batch


def collate_documents(rows: Sequence[Mapping[str, Any]], *, pad: int) -> dict[str, Tensor]:
    """A batch of rows with one document: `input_ids`, `attention_mask` and `labels` ``[batch, tokens]``."""
    batch = collate_packed(rows, pad=pad, isolate="positions")
    del batch["position_ids"]
    used = torch.tensor([len(row["input_ids"]) for row in rows])
    batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < used[:, None]).long()
    return batch


def require_isolation(model: nn.Module, *, vocabulary: int, length: int, isolate: str) -> None:
    """Refuse a model for which documents of one row are not apart. It is tried, with documents of a few tokens.

    The model takes `input_ids` and what `collate_packed` adds, and returns `logits`
    ``[batch, tokens, vocabulary]``; a row has up to `length` tokens.

    Raises:
        ConfigError: it takes no such argument, or its logits of a document depend on the others of the row.
    """
    cause: Exception | None = None
    try:
        why = _find_mixing(model, vocabulary, length, isolate)
    except (RuntimeError, TypeError, ValueError) as error:
        why, cause = f"it fails with such a batch ({first_line(error)})", error
    if why is None:
        return
    other = "try prepare.options.isolate=positions"
    if isolate == "positions":
        other = "try prepare.options.isolate=mask, which gives the model the mask itself"
    what = f"The model {type(model).__name__} cannot train on packed rows: {why}."
    remedy = f"Set prepare.options.pack=[] (every document then has its own row), or {other}."
    raise ConfigError(what, field=FIELD, value=isolate, remedy=remedy) from cause


def _find_mixing(model: nn.Module, vocabulary: int, length: int, isolate: str) -> str | None:
    """Why the model does not keep documents apart in a batch of two rows; None: it does."""
    needed = ("position_ids", "attention_mask") if isolate == "mask" else ("position_ids",)
    taken = inspect.signature(model.forward).parameters
    # A wrapper that takes anything (peft's) hands it on.
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    lacking = next((name for name in needed if name not in taken and not anything), None)
    if lacking is not None:
        return f"it takes no {lacking}"
    if any(param.is_meta for param in model.parameters()):
        return None  # without values there is nothing to compare
    window = getattr(getattr(model, "config", None), "sliding_window", None)
    if isolate == "mask" and window is not None and window < length:
        return f"a mask that is given replaces its window of {window} tokens"
    size = max(1, min(length // 2, 6))
    first, other, second = ((np.arange(size) + 1) * step % vocabulary for step in (1, 5, 3))
    together, changed = (_logits(model, [before, second], isolate)[0, size:] for before in (first, other))
    alone = _logits(model, [second], isolate)[0]
    if not torch.equal(together, changed):
        return "its outputs for a document change with the document in front of it"
    if float((together - alone).abs().max()) > _TOLERANCE * float(alone.abs().max()):
        return "its outputs for a document change with the place of the document in the row"
    return None


def preprocess_logits_for_metrics(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Reduce logits ``[batch, tokens, vocabulary]`` to ``[batch, 2]``: a row's negative log-likelihood, and targets.

    Without labels they are reduced already.
    """
    if labels is None:
        return logits
    targets = labels[:, 1:]
    scores = logits[:, :-1].transpose(1, 2).float()
    nats = nn.functional.cross_entropy(scores, targets, ignore_index=NO_TARGET, reduction="none")
    return torch.stack((nats.sum(dim=1), (targets != NO_TARGET).sum(dim=1).to(nats.dtype)), dim=1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode, without gradients, and put it back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _logits(model: nn.Module, documents: Sequence[np.ndarray], isolate: str) -> Tensor:
    row = {"input_ids": np.concatenate(documents), "lengths": [len(document) for document in documents]}
    batch = collate_packed([row] * 2, pad=0, isolate=isolate)
    del batch["labels"]
    device = next(model.parameters()).device
    with evaluating(model):
        outputs = model(**{name: tensor.to(device) for name, tensor in batch.items()})
    logits: Tensor = outputs["logits"]
    return logits.float()


# -- new rows, which no prepare has seen ------------------------------------------------------------------------------
def collate_texts(rows: Sequence[Mapping[str, Any]], tokenizer: Any, info: Mapping[str, Any]) -> dict[str, Tensor]:
    """A batch of texts, which are cut into pieces as those of training are.

    Args:
        rows: the text in the column `info["text"]`, and maybe `new_tokens`.
        tokenizer: as the recipe keeps it.
        info: what prepare noted: `text`, `length` and `overlong`.

    Returns:
        `wanted` ``[rows]``, the tokens that texts are continued by; `row_of` ``[pieces]``, and `input_ids`,
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
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    used = torch.tensor(list(map(len, prompts)))
    return ids, (torch.arange(width) >= width - used[:, None]).long()


def row_likelihoods(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The negative log-likelihoods of texts, and their targets ``[rows, 2]``: the sums over their pieces.

    The batch is as `collate_texts` makes it.
    """
    rows, row_of = len(batch["wanted"]), batch["row_of"]
    found = torch.zeros(rows, 2, device=row_of.device)
    for start in range(0, len(row_of), rows):  # a long text has many pieces: as many at a time as there are rows
        part = slice(start, start + rows)
        logits = model(input_ids=batch["input_ids"][part], attention_mask=batch["attention_mask"][part])["logits"]
        sums = preprocess_logits_for_metrics(logits, batch["labels"][part])
        found.index_add_(0, row_of[part], sums.to(found.dtype))
    return found


# -- new tokens, the most likely one each time, up to one that ends the text -------------------------------------------
_ANSWER = "An answer."


def end_tokens(tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the tokenizer's end, and the special one that its chat template writes behind it.

    A model that was made for texts may end turns by another token than texts.
    """
    ends = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if not getattr(tokenizer, "chat_template", None):
        return ends
    turns = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": _ANSWER}]
    behind = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(_ANSWER)[2]
    known = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number for number, token in known.items() if token.special} | set(tokenizer.all_special_ids)
    written = tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"]
    return list(dict.fromkeys([*ends, *[token for token in written if token in special][:1]]))


def stop_at(model: Any, ends: Sequence[int]) -> None:
    """Have all that a model generates end at these tokens, besides those at which it ends already."""
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        settings.eos_token_id = list(dict.fromkeys([*known_ends(model), *ends])) or None


def known_ends(model: Any) -> list[int]:
    """The tokens at which what a model generates ends."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def continue_prompts(model: Any, ids: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
    """New tokens ``[texts, tokens]``, the most likely one each time; behind a text's end and its last one, -100.

    Args:
        model: a model of transformers that generates.
        ids: ``[texts, tokens]``, with their `mask`, as `batch_prompts` makes them.
        wanted: ``[texts]``, how many tokens each gets, at most.
    """
    most = int(wanted.max())
    if most == 0:
        return torch.full((len(ids), 1), NO_TARGET, device=ids.device)
    ends = known_ends(model)
    # What follows an end is left out below, so any token fills it up.
    settings = {"max_new_tokens": most, "do_sample": False, "use_cache": True, "pad_token_id": (ends or [0])[0]}
    new: Tensor = model.generate(input_ids=ids, attention_mask=mask, **settings)[:, ids.shape[1] :]
    over = torch.arange(new.shape[1], device=ids.device) >= wanted[:, None]
    is_end = torch.isin(new, torch.tensor(ends, dtype=new.dtype, device=ids.device)).long()
    return new.masked_fill(over | (is_end.cumsum(dim=1) - is_end > 0), NO_TARGET)


def generate(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The tokens that continue prompts, at most `new_tokens`, without the one that ends them.

    The model is one of transformers that generates, in evaluation mode. Prompts of a similar length share a batch.
    """
    ends, device = set(known_ends(model)), next(model.parameters()).device
    made: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), _TOGETHER):
        some = order[start : start + _TOGETHER]
        ids, mask = (part.to(device) for part in batch_prompts([prompts[number] for number in some], pad=0))
        with torch.no_grad():
            new = continue_prompts(model, ids, mask, torch.full((len(some),), new_tokens, device=device))
        for number, row in zip(some, new.tolist(), strict=True):
            made[number] = [token for token in row if token >= 0 and token not in ends]
    return made
