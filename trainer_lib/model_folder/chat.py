"""`Chat`: a conversation with a trained model, by the template and the system prompt that are kept with it.

Nothing of what is said is logged or written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.model_folder.loaded import LoadedModel
from trainer_lib.recipes.chat_templates import ChatTemplate, FaultyError
from trainer_lib.recipes.generation import end_tokens, known_ends
from trainer_lib.recipes.model_places import from_place, import_transformers

Show = Callable[[str], None]
"""Takes a piece of an answer as soon as it is made."""


@dataclass(frozen=True)
class Spoken:
    """An answer, its number of tokens, and whether Ctrl-C ended it."""

    text: str
    tokens: int
    is_whole: bool


@dataclass
class Chat:
    """A conversation, which every answer continues.

    Attributes:
        loaded: the model.
        system: the first turn; None: the one that the model was trained with, if there was one; empty: none.
        new_tokens: the most tokens of an answer.
        temperature: 0: the most likely token each time; above: drawn.
        turns: what was said so far.

    Raises:
        ConfigError: the model has no chat template, or generates no text.
    """

    loaded: LoadedModel
    system: str | None = None
    new_tokens: int = 512
    temperature: float = 0.0
    turns: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        info, self._model = self.loaded.description.info, self.loaded.model
        tokenizer = self.loaded.tokenizer
        if getattr(tokenizer, "chat_template", None) is None or not hasattr(self._model, "generate"):
            what, remedy = "The model was not trained on conversations.", "Ask it with trainflow predict."
            raise ConfigError(what, field="MODEL", value=self.loaded.url, remedy=remedy)
        self._template = ChatTemplate(tokenizer, None)
        self.system = info.get("system") if self.system is None else self.system
        self._device, self._base = self.loaded.device, None
        self._length = getattr(self._model.config, "max_position_embeddings", None) or info["length"]
        self._model.to(self._device)

    def answer(self, said: str, show: Show, *, heading: Show | None = None) -> tuple[Spoken, Spoken | None]:
        """What the model answers, which the conversation keeps, and what its base says in its place, if that is asked.

        Args:
            heading: asks for the answer of the base as well, which comes first; gets "base", and then "model".

        Raises:
            DataError: the conversation is too long, or the template does not take it. ConfigError: there is no base.
        """
        turns = [*self.turns, {"role": "user", "content": said}]
        tokens = self._tokenize(turns)
        beside = None
        if heading is not None:
            base = self._as_base()
            heading("base")
            beside = self._generate(tokens, show, base)
            heading("model")
        spoken = self._generate(tokens, show, nullcontext(self._model))
        self.turns = [*turns, {"role": "assistant", "content": spoken.text}]
        return spoken, beside

    def _tokenize(self, turns: list[dict[str, Any]]) -> list[int]:
        try:
            tokens = self._template.ask(
                [*([{"role": "system", "content": self.system}] if self.system else []), *turns]
            )
        except FaultyError as fault:
            raise DataError(f"{fault}.", field="chat", remedy="Say something else, or begin again: /reset.") from fault
        if len(tokens) >= self._length:
            what = f"The conversation has {len(tokens):,} tokens, and the model reads {self._length:,}."
            raise DataError(what, field="chat", remedy="Begin again: /reset.")
        return tokens

    def _generate(self, tokens: list[int], show: Show, used: AbstractContextManager[Any]) -> Spoken:
        tokenizer, pieces = self._template.tokenizer, list[str]()

        class Streamer(import_transformers().TextStreamer):  # type: ignore[misc]  # transformers is imported late
            """Hands on each piece of the text."""

            made = -1  # the prompt comes first

            def put(self, value: Any) -> None:
                """Take the next token."""
                self.made += 1
                super().put(value)

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                """Take a piece that stays as it is."""
                pieces.append(text)
                show(text)

        streamer: Any = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids = torch.tensor([tokens], device=self._device)
        draws = {"do_sample": True, "temperature": self.temperature} if self.temperature > 0 else {"do_sample": False}
        ends, is_whole = self._ends(), True
        try:
            with torch.no_grad(), used as model:
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=min(self.new_tokens, self._length - len(tokens)),
                    eos_token_id=ends,
                    pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0],
                    use_cache=True,
                    streamer=streamer,
                    **draws,
                )
        except KeyboardInterrupt:
            is_whole = False
            streamer.end()
        show("\n")
        return Spoken("".join(pieces).strip(), max(streamer.made, 0), is_whole)

    def _ends(self) -> list[int]:
        """The tokens that end an answer: those of the model, and of the tokenizer."""
        ends = [*known_ends(self._model), *end_tokens(self._template.tokenizer)]
        return list(dict.fromkeys(ends)) or [0]

    def _as_base(self) -> AbstractContextManager[Any]:
        """The model as it was before training: without its adapters, or loaded by its name or folder.

        Raises:
            ConfigError: it began at random, or cannot be loaded.
        """
        built: Any = self._model
        if hasattr(built, "disable_adapter"):
            without: AbstractContextManager[Any] = _Without(built)
            return without
        settings = self.loaded.description.model
        place = settings.get("pretrained") or settings.get("folder")
        if place is None:
            what = "The model began with weights at random, so there is no base to compare with."
            raise ConfigError(what, field="--base", remedy="Leave --base out.")
        if self._base is None:
            self._base = from_place("AutoModelForCausalLM", str(place), field="--base").to(self._device).eval()
        return nullcontext(self._base)


class _Without(AbstractContextManager[Any]):
    """A model whose adapters are left aside inside the block."""

    def __init__(self, model: Any) -> None:
        self._model, self._left = model, model.disable_adapter()

    def __enter__(self) -> Any:
        self._left.__enter__()
        return self._model

    def __exit__(self, *problem: Any) -> None:
        self._left.__exit__(*problem)
