"""`install`: our classes in place of those of transformers, for libraries that import these by themselves.

TRL, sentence-transformers and others say ``from transformers import Trainer`` in files of their own. A library that is
imported after `install` gets our classes there, and its subclasses derive from ours. A class that exists keeps its
bases, so `install` refuses when a module has imported one of the classes before.

::

    trainer_lib ──▶ transformers, transformers.trainer, .trainer_callback, .training_args …   (names, in place)
                                        ▲ from transformers import Trainer
                                   the library

Nothing inside a class or function of transformers changes; the names that other code imports are bound to ours.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Self

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.parser import add_old_names
from trainer_lib.arguments.validation import REPORTERS
from trainer_lib.errors import ConfigError, MissingExtraError

#: The names to replace, by the module of transformers that defines them.
_DEFINED_IN: Mapping[str, tuple[str, ...]] = {
    "transformers.trainer": ("Trainer",),
    "transformers.trainer_seq2seq": ("Seq2SeqTrainer",),
    "transformers.hf_argparser": ("HfArgumentParser",),
    "transformers.training_args": ("TrainingArguments", "OptimizerNames", "ParallelMode"),
    "transformers.training_args_seq2seq": ("Seq2SeqTrainingArguments",),
    "transformers.trainer_callback": (
        *("CallbackHandler", "DefaultFlowCallback", "EarlyStoppingCallback", "ExportableState", "PrinterCallback"),
        *("ProgressCallback", "TrainerCallback", "TrainerControl", "TrainerState"),
    ),
    "transformers.trainer_utils": (
        *("BestRun", "EvalLoopOutput", "EvalPrediction", "HubStrategy", "IntervalStrategy", "PredictionOutput"),
        *("SaveStrategy", "SchedulerType", "TrainOutput", "get_last_checkpoint"),
    ),
}
#: A class derived from one of these would not be ours; any other name may be imported before.
_DECISIVE = ("Trainer", "Seq2SeqTrainer", "TrainingArguments", "Seq2SeqTrainingArguments")
_ABSENT = object()
_log = logging.getLogger(__name__)


class Installation:
    """Names that a call of `install` replaced. As a context manager, it puts everything back when the block ends."""

    def __init__(self) -> None:
        self._replaced: list[tuple[ModuleType, str, Any]] = []

    def replace(self, places: Iterable[tuple[ModuleType, str]]) -> None:
        """Bind each name in its module to our object of that name, and keep what it was bound to."""
        for module, name in places:
            # A lazy module imports a name when it is first used: until then it has none to keep.
            self._replaced.append((module, name, vars(module).get(name, _ABSENT)))
            setattr(module, name, _ours(name))
        self._forget_cached()

    def undo(self) -> None:
        """Put back what was replaced. Libraries imported meanwhile keep our classes."""
        for module, name, value in reversed(self._replaced):
            if value is not _ABSENT:
                setattr(module, name, value)
            elif name in vars(module):
                delattr(module, name)
        self._forget_cached()
        self._replaced.clear()

    def _forget_cached(self) -> None:
        """Make the package look the names up again, in the modules that define them."""
        names = {name for _, name, _ in self._replaced}
        for package in _packages():
            for name in names & vars(package).keys():
                delattr(package, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if _installed and _installed[-1] is self:
            _installed.pop()
        self.undo()


_installed: list[Installation] = []


def install() -> Installation:
    """Put our Trainer, arguments, callbacks and results in place of those of transformers, for libraries imported next.

    Call it before the first import of the library that brings its own subclass of the Trainer::

        import trainer_lib

        trainer_lib.install()
        from trl import SFTConfig, SFTTrainer  # derive from our classes

    `uninstall` puts the names of transformers back; so does the end of a ``with trainer_lib.install():`` block. What a
    library imported meanwhile stays ours. A second call while the classes are in place changes nothing.

    Returns:
        A context manager, which may be ignored.

    Raises:
        MissingExtraError: transformers is not installed.
        ConfigError: a module has imported transformers' Trainer or TrainingArguments already, or derived a class from
            one of them; nothing was replaced.
    """
    if _installed:
        return Installation()
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("There is nothing to replace without transformers.", extra="transformers")
    originals: dict[str, Any] = {}  # an older version has not all of the names
    for home, names in _DEFINED_IN.items():
        module = importlib.import_module(home)
        originals |= {name: vars(module)[name] for name in names if name in vars(module)}
    _refuse_early_imports({name: originals[name] for name in _DECISIVE})
    installation = Installation()
    installation.replace(list(_places(originals)))
    _installed.append(installation)
    _log.info("The Trainer of transformers is replaced by trainer_lib's for libraries that are imported from now on.")
    return installation


def uninstall() -> None:
    """Put the names of transformers back; without `install` before, do nothing.

    A library that was imported meanwhile keeps our classes: to get it back to transformers' own, start a new process.
    """
    while _installed:
        _installed.pop().undo()


def _places(originals: Mapping[str, Any]) -> Iterator[tuple[ModuleType, str]]:
    """Every name to replace, with the module that other code imports it from."""
    for module in map(importlib.import_module, _DEFINED_IN):
        # A module that defines another name gets it from its neighbours: scripts import `TrainerState` from anywhere.
        yield from ((module, name) for name, original in originals.items() if vars(module).get(name) is original)
    trackers = importlib.import_module("transformers.integrations")
    yield from ((trackers, row.callback) for row in REPORTERS.values() if row.is_ours and row.callback in dir(trackers))


def _packages() -> Iterator[ModuleType]:
    """Every module object called transformers.

    While it is imported it replaces its entry in `sys.modules` by another object, more than once: code that imported it
    early holds an older one. Each imports names on demand and then keeps them.
    """
    for module in gc.get_objects():
        if issubclass(type(module), ModuleType) and module.__dict__.get("__name__") == "transformers":
            yield module


def _ours(name: str) -> Any:
    if name == "HfArgumentParser":
        return _parser_with_old_names()
    # By name: the package resolves its public names when they are first used.
    home = "trainer_lib.arguments" if name == "ParallelMode" else "trainer_lib"
    return getattr(importlib.import_module(home), name)


@functools.cache
def _parser_with_old_names() -> type:
    """Transformers' own parser, which also takes the old names of our arguments."""
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):
        __doc__ = HfArgumentParser.__doc__

        def _add_dataclass_arguments(self, dtype: Any) -> None:
            super()._add_dataclass_arguments(dtype)
            if issubclass(dtype, TrainingArguments):
                add_old_names(self, dtype)

    Parser.__name__ = Parser.__qualname__ = "HfArgumentParser"
    return Parser


def _refuse_early_imports(originals: Mapping[str, Any]) -> None:
    """Raise ConfigError when code outside of transformers holds one of these classes, or a class derived from one."""
    holders = dict.fromkeys([*_importing_modules(originals), *_deriving_modules(originals)])
    if not holders:
        return
    names = list(holders)
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    libraries = dict.fromkeys(name.partition(".")[0] for name in names if name != "__main__")
    earlier = [f"the first import of {library}" for library in libraries]
    if "__main__" in names:
        earlier.append("that script's other imports")
    what = "These modules have imported the Trainer or TrainingArguments of transformers already, and would keep them."
    shown, remedy = ", ".join(names[:3]) + more, f"Call trainer_lib.install() before {' and '.join(earlier)}."
    raise ConfigError(what, field="trainer_lib.install", value=shown, remedy=remedy)


def _importing_modules(originals: Mapping[str, Any]) -> Iterator[str]:
    wanted = {id(original) for original in originals.values()}
    for name, module in sorted(sys.modules.items()):
        if not isinstance(module, ModuleType) or _is_exempt(name):
            continue
        # `vars` reads what is bound; `getattr` would make a lazy module import it.
        if any(id(value) in wanted for value in list(vars(module).values())):
            yield name


def _deriving_modules(originals: Mapping[str, Any]) -> Iterator[str]:
    waiting, seen = list(originals.values()), set()
    while waiting:
        for derived in type.__subclasses__(waiting.pop()):
            if derived not in seen:
                seen.add(derived)
                waiting.append(derived)
                if not _is_exempt(derived.__module__):
                    yield derived.__module__


def _is_exempt(module: str) -> bool:
    return module.partition(".")[0] in ("transformers", "trainer_lib", "__mp_main__")  # the last is `__main__` too
