"""A PyTorch trainer library, independent of any orchestrator. Importing it does not import torch.

`__init__.pyi`, which type checkers and editors read, lists every public name by its module. The module is imported when
the name is first used.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any


def _read_names() -> dict[str, str]:
    """Public name -> the module that defines it."""
    listed = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = [node for node in listed if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_NAMES = _read_names()
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module and keep it (PEP 562).

    Raises:
        AttributeError: the name is not a public one.
    """
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
