"""`Chat`: a conversation with a trained model, by the template and the system prompt that are kept with it.

Nothing of it is logged or written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.model_folder.loaded import LoadedModel
from trainer_lib.recipes.shared.model_places import as_it_began, from_place, import_transformers
from trainer_lib.recipes.texts.packed_batches import end_tokens, known_ends
from trainer_lib.recipes.texts.templates import ChatTemplate, FaultyError

Show = Callable[[str], None]
"""Takes a piece of an answer as soon as it is made."""


class Spoken(NamedTuple):
    """An answer, its number of tokens, and whether the model ended it: neither Ctrl-C nor the limit of tokens did."""

    text: str
    tokens: int
    is_whole: bool


class Chat:
    """A conversation, which every answer continues.

    Args:
        system: the first turn; None: that of training; empty: none.
        new_tokens: the most tokens of an answer.
        temperature: 0: always the most likely token; above: drawn.

    Raises:
        ConfigError: the model has no chat template, or generates no text.
    """

    def __init__(
        self, loaded: LoadedModel, system: str | None = None, *, new_tokens: int = 512, temperature: float = 0.0
    ) -> None:
        self._model: Any = loaded.model.to(loaded.device)
        tokenizer, self._given = loaded.tokenizer, loaded.description
        if getattr(tokenizer, "chat_template", None) is None or not hasattr(self._model, "generate"):
            what, remedy = "The model was not trained on conversations.", "Ask it with trainflow predict."
            raise ConfigError(what, field="MODEL", value=loaded.url, remedy=remedy)
        self.system: str | None = self._given.info.get("system") if system is None else system
        self.turns: list[dict[str, Any]] = []  # those so far, without the first one
        self._template, self._device, self._base = ChatTemplate(tokenizer, None), loaded.device, None
        read = self._given.info.get("length") or self._given.info.get("max_length")  # by the recipes of answers
        self._length: Any = getattr(self._model.config, "max_position_embeddings", None) or read
        draws = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        ends = list(dict.fromkeys([*known_ends(self._model), *end_tokens(tokenizer)])) or [0]
        pad = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._settings: dict[str, Any] = {**draws, "eos_token_id": ends, "pad_token_id": pad, "use_cache": True}
        self._new_tokens = new_tokens

    def answer(self, text: str, show: Show, *, heading: Show | None = None) -> tuple[Spoken, Spoken | None]:
        """The model's answer, which the conversation keeps, and that of its base in its place, if that is asked.

        Args:
            heading: asks for the answer of the base as well, which comes first; gets "base", and then "model".

        Raises:
            DataError: the conversation is too long, or the template does not take it. ConfigError: there is no base.
        """
        turns, base_answer = [*self.turns, {"role": "user", "content": text}], None
        tokens = self._tokenize(turns)
        if heading is not None:
            with as_it_began(self._model, self._load_base) as base:
                heading("base")
                base_answer = self._generate(base, tokens, show)
            heading("model")
        spoken = self._generate(self._model, tokens, show)
        self.turns = [*turns, {"role": "assistant", "content": spoken.text}]
        return spoken, base_answer

    def _tokenize(self, turns: list[dict[str, Any]]) -> list[int]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        try:
            tokens = self._template.ask([*first, *turns])
        except FaultyError as fault:
            raise DataError(f"{fault}.", field="chat", remedy="Write something else, or begin again.") from fault
        if len(tokens) >= self._length:
            what = f"The conversation has {len(tokens):,} tokens, and the model reads {self._length:,}."
            raise DataError(what, field="chat", remedy="Begin again, or write less.")
        return tokens

    def _generate(self, model: Any, tokens: list[int], show: Show) -> Spoken:
        pieces, made = list[str](), list[int]()

        class Streamer(import_transformers().TextStreamer):  # type: ignore[misc]  # transformers is imported late
            def put(self, value: Any) -> None:
                made.append(int(value.flatten()[-1]))
                super().put(value)

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                pieces.append(text)
                show(text)

        streamer: Any = Streamer(self._template.tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids = torch.tensor([tokens], device=self._device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self._settings}
        most = min(self._new_tokens, self._length - len(tokens))
        try:
            with torch.no_grad():
                model.generate(**given, max_new_tokens=most, streamer=streamer)
        except KeyboardInterrupt:
            streamer.end()
        show("\n")
        new, ends = made[1:], self._settings["eos_token_id"]  # the prompt comes first
        return Spoken("".join(pieces).strip(), len(new), bool(set(new[-1:]) & set(ends)))

    def _load_base(self) -> Any:
        """The model that training began with, loaded by its name or folder, once."""
        place = self._given.model.get("pretrained") or self._given.model.get("folder")
        if place is None:
            what = "The model began with weights at random, so there is no base to compare with."
            raise ConfigError(what, field="--base", remedy="Leave --base out.")
        if self._base is None:
            self._base = from_place("AutoModelForCausalLM", str(place), field="--base").to(self._device).eval()
        return self._base
