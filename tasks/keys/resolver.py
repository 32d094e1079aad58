"""Shared inputs of a command's stages, checks and keys: computed once, then remembered.

The training arguments of a stage, its launch on this machine and the source closure of its recipe are needed by the
check of the spec, by the content keys and by the tasks. One `Resolver` serves one command; nothing is
remembered between commands.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainflow.tasks.code.closure import Closure, closure
from trainflow.tasks.code.reach import Code
from trainflow.tasks.configs import LaunchSettings
from trainflow.tasks.keys.spec_words import in_words_of_spec

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.launch.settings.config import LaunchConfig

T = TypeVar("T")

_TRUST_S = 60.0  # a run looks at a result twice within seconds, for its plan and in the stage


class Resolver:
    """Arguments, launches, closures and source digests of one command. Safe to use from several threads."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], Any] = {}
        self._assumed: dict[str, dict[str, str]] = {}
        self.as_of: datetime | None = None
        """The time by which the age of results counts, for a run that continues: when it began. None: now."""

    def arguments(self, args: Mapping[str, Any], *, prefix: str = "train.args") -> TrainingArguments:
        """The training arguments with these settings, shared: do not change them. Errors name them under `prefix`."""
        from trainer_lib.arguments import TrainingArguments

        return self.once(("arguments", _text(args)), lambda: TrainingArguments.from_dict(args, prefix=prefix))

    def launch(self, settings: LaunchSettings, *, use_cpu: bool, section: str = "train") -> LaunchConfig:
        """A launch with every "auto" resolved for this machine. Errors name its settings as those of `section`."""
        from trainer_lib.launch.settings.config import resolve_config

        config = settings.to_config()
        with in_words_of_spec(section):
            return self.once(("launch", repr(config), str(use_cpu)), lambda: resolve_config(config, use_cpu=use_cpu))

    def closure(
        self, recipe: str | Path, root: str | Path | None, *, fallback: str | Path | None = None, field: str = "recipe"
    ) -> Closure:
        """The files that a recipe consists of. One that was edited meanwhile is read again.

        A stage is keyed by the code that its worker is about to load: during a long training, the functions that
        evaluate uses may be edited. `fallback` has the functions that the recipe does not define; errors are about
        `field`.
        """
        fallback = None if fallback is None or Path(fallback) == Path(recipe) else fallback
        key = ("closure", str(recipe), str(fallback or ""), "" if root is None else str(root))
        known: Closure | None = self._found.get(key)
        if known is not None and not known.is_current():
            # Forgotten, so that the next line reads the edited file.
            self._found.pop(key, None)
        return self.once(key, lambda: closure(recipe, root, fallback=fallback, field=field))

    def code(self, recipe: str | Path, fallback: str | Path | None, root: str | Path | None) -> Code:
        """The code of a recipe and its fallback, function by function; of edited files, as they are now."""
        paths = list(dict.fromkeys(Path(path) for path in (recipe, fallback) if path is not None))
        files = self.closure(recipe, root, fallback=fallback)
        key = ("code", *(str(path) for path in paths), "" if root is None else str(root))
        known: Code | None = self._found.get(key)
        # Compared as objects: a closure that was read again is another one.
        if known is None or known.closure is not files:
            self._found[key] = known = Code(files, paths)
        return known

    def sources(self, sources: Sequence[str], *, root: str | None, memory: Path | None) -> list[dict[str, str]]:
        """A label and a digest of each declared source of the data; see `trainflow.tasks.keys.sources.fingerprints`."""
        from trainflow.tasks.keys.sources import fingerprints

        here = [source for source in sources if source not in self._assumed]
        key = ("sources", _text(here), root or "", str(memory))
        found = dict(zip(here, self.once(key, lambda: fingerprints(here, root=root, memory=memory)), strict=True))
        return [self._assumed.get(source) or found[source] for source in sources]

    def assume_sources(self, known: Mapping[str, dict[str, str]]) -> None:
        """Count these sources, which are not on this machine, as a run recorded them: with their labels and digests."""
        self._assumed.update(known)

    @property
    def assumed_sources(self) -> tuple[str, ...]:
        """The sources that are not on this machine; the data that was made from them must be committed."""
        return tuple(self._assumed)

    def check_sources(self, sources: Sequence[str]) -> None:
        """Raise ConfigError unless every declared source that is not assumed exists."""
        from trainflow.tasks.keys.sources import check

        check([source for source in sources if source not in self._assumed])

    def inspect_once(self, key: tuple[str, ...], look: Callable[[], str | None]) -> str | None:
        """The problem that `look` finds with a thing; a thing without one is not looked at again for a minute."""
        looked = ("intact", *key)
        if time.monotonic() - self._found.get(looked, -math.inf) < _TRUST_S:
            return None
        problem = look()
        if problem is None:
            self._found[looked] = time.monotonic()
        return problem

    def once(self, key: tuple[str, ...], compute: Callable[[], T]) -> T:
        """The first result of `compute` under a key, for the whole command."""
        # Two threads may compute the same value; both then use the one that was stored first.
        if key not in self._found:
            self._found.setdefault(key, compute())
        found: T = self._found[key]
        return found


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)
