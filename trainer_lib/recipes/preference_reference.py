"""The model that a training by preferences begins with, and that it is compared to: the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer_lib.recipes.causal_models import load_causal_model, new_causal_model


class FirstModel:
    """How to build the model that training begins with; each time it is the same one.

    Args:
        info: what prepare noted: the model's `config`, `seed`, `max_length` and `dtype`, and the tokenizer's
            `vocabulary` and `ends`.
        place: its name or its folder; None for weights at random.
    """

    def __init__(self, info: Mapping[str, Any], place: str | None) -> None:
        self._info = {name: info[name] for name in ("config", "seed", "max_length", "dtype", "vocabulary", "ends")}
        self._place = place
        self._built: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}

    @property
    def pad(self) -> int:
        """The token that fills up short texts."""
        return int(self._info["ends"]["pad_token_id"])

    def build(self, *, field: str) -> Any:
        """The model, on the CPU; the generators of random numbers stay as they are.

        Args:
            field: the setting that names the model, for errors.

        Raises:
            ConfigError: transformers cannot load it, or it does not know all tokens.
        """
        info = self._info
        if self._place is not None:
            return load_causal_model(self._place, dtype=info["dtype"], vocabulary=info["vocabulary"], field=field)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(info["seed"])
            facts = {"length": info["max_length"], "vocabulary": info["vocabulary"], "ends": info["ends"]}
            return new_causal_model(info["config"], **facts, field="prepare.options")

    def once(self, device: torch.device) -> Any:
        """The model in evaluation mode, built at the first call."""
        if self._built is None:
            self._built = self.build(field="train.model").to(device).eval()
        return self._built
