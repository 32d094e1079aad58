"""Names that code makes at run time: where these are used, a recipe's functions cannot be found by reading it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_BUILTINS = {"eval", "exec", "compile", "globals", "__import__", "breakpoint", "__builtins__", "__loader__", "__spec__"}
_MODULES = {
    "builtins.__dict__", "cPickle", "cloudpickle", "code", "dill", "gc", "hydra.utils", "importlib", "joblib",
    "marshal", "pandas.read_pickle", "pickle", "pkgutil", "pydoc", "runpy", "shelve", "sys._getframe", "sys.modules",
    "torch.load",
}  # fmt: skip
_LOADERS = {"importlib.metadata.EntryPoint", "importlib.metadata.distribution", "importlib.metadata.entry_points"}
# Of the modules above, what only reads facts or writes.
_HARMLESS = {
    "importlib.metadata", "importlib.resources", "importlib.util.find_spec", "pickle.HIGHEST_PROTOCOL",
    "pickle.PickleError", "pickle.dump", "pickle.dumps",
}  # fmt: skip
_INSPECT = {"getmembers", "getmodule", "stack", "currentframe", "trace", "getsource", "getsourcelines", "getsourcefile"}
_ATTRIBUTES = {
    "locals()",
    "vars()",
    "dir()",
    "__globals__",
    "__subclasses__",
    "_getframe",
    "f_globals",
    "f_back",
    "__builtins__",
    "exec_module",
    "load_module",
    "tb_frame",
}
_READS_TEXTS = {"query", "eval", "evaluate", "sql"}
_SOURCE = {"getsource", "getsourcelines", "getsourcefile", "linecache", "co_firstlineno", "f_lineno", "tb_lineno"}


def names_made_at_run_time(outside: Iterable[str], *, words: Collection[str] = ()) -> str | None:
    """What of these lets code reach names that it does not spell out; None for nothing.

    Args:
        outside: dotted names in installed packages and builtins.
        words: attributes that the code reads, of whatever object.
    """
    for name in sorted(outside):
        head, _, rest = name.partition(".")
        if head == "builtins" and rest.partition(".")[0] in _BUILTINS:
            return rest
        if head == "inspect" and rest.partition(".")[0] in _INSPECT:
            return name
        if name in _LOADERS or (name == "numpy.load" and "allow_pickle" in words):
            return name
        if _is_below(name, _MODULES) and not _is_below(name, _HARMLESS) and name not in ("importlib", "pickle"):
            return name
    return next(iter(sorted(_ATTRIBUTES.intersection(words) | (_SOURCE.intersection(words)))), None)


def names_in_texts(words: Collection[str], texts: Iterable[str]) -> set[str]:
    """Names that code may read by its texts: `frame.query("n < @LIMIT")`, and tables that SQL names."""
    if not _READS_TEXTS.intersection(words):
        return set()
    return {name for text in texts for name in re.findall(r"[^\W\d]\w*", text)}


def reads_source(words: Iterable[str]) -> bool:
    """Whether code reads its own source or line numbers, so that even comments count."""
    return bool(_SOURCE.intersection(words))


def _is_below(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
