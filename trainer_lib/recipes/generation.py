"""New tokens by a language model: in batches, the most likely one each time, up to a token that ends the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_lib.recipes.packed_batches import NO_TARGET, batch_prompts

_ANSWER = "An answer."
TOGETHER = 16
"""Prompts that a model continues at once."""


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


def continue_prompts(
    model: Any, ids: Tensor, mask: Tensor, wanted: Tensor, *, pad: int, ends: Sequence[int] = (), streamer: Any = None
) -> Tensor:
    """New tokens ``[texts, tokens]``, the most likely one each time; behind a text's end and its last one, -100.

    Args:
        model: a model of transformers that generates.
        ids: ``[texts, tokens]``, with their `mask`, as `batch_prompts` makes them.
        wanted: ``[texts]``, how many tokens each gets, at most.
        pad: the token behind the end of a text.
        ends: the tokens that end a text; none: those of the model.
        streamer: of transformers; takes the tokens of a single text as they come.
    """
    most = int(wanted.max())
    if most == 0:
        return torch.full((len(ids), 1), NO_TARGET, device=ids.device)
    stops = list(ends) or known_ends(model)
    settings: dict[str, Any] = {"max_new_tokens": most, "do_sample": False, "use_cache": True, "pad_token_id": pad}
    settings |= {"eos_token_id": stops} if stops else {}
    made: Tensor = model.generate(input_ids=ids, attention_mask=mask, streamer=streamer, **settings)
    new = made[:, ids.shape[1] :]
    over = torch.arange(new.shape[1], device=ids.device) >= wanted[:, None]
    is_end = torch.isin(new, torch.tensor(stops, dtype=new.dtype, device=ids.device)).long()
    return new.masked_fill(over | (is_end.cumsum(dim=1) - is_end > 0), NO_TARGET)


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: Sequence[int],
    *,
    ends: Sequence[int] = (),
    pad: int | None = None,
    streamer: Any = None,
) -> list[list[int]]:
    """The tokens that continue each prompt, without the one that ends them.

    Args:
        model: a model of transformers that generates, in evaluation mode.
        tokenizer: gives the padding where `pad` does not.
        prompts: tokens of each; those of a similar length share a batch.
        new_tokens: the most tokens of each.
        ends: the tokens that end a text; none: those of the model.
        streamer: as of `continue_prompts`, for a single prompt.
    """
    filling = (tokenizer.pad_token_id or 0) if pad is None else pad
    stops, device = set(ends) or set(known_ends(model)), next(model.parameters()).device
    made: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), TOGETHER):
        some = order[start : start + TOGETHER]
        ids, mask = (part.to(device) for part in batch_prompts([prompts[number] for number in some], pad=filling))
        wanted = torch.tensor([new_tokens[number] for number in some], device=device)
        with torch.no_grad():
            new = continue_prompts(model, ids, mask, wanted, pad=filling, ends=ends, streamer=streamer)
        for number, row in zip(some, new.tolist(), strict=True):
            made[number] = [token for token in row if token >= 0 and token not in stops]
    return made
