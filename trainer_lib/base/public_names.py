"""Public names of a package by its stub `__init__.pyi`, which type checkers and editors read: imported at first use."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer_lib.errors import MissingExtraError


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the functions `__getattr__` and `__dir__` of a package (PEP 562) and its `__all__`.

    A name may be that of another package: without it, both lists lack the name, and its use raises MissingExtraError.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    installed = {owner for owner in {home.partition(".")[0] for home in homes.values()} if find_spec(owner)}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        owner = homes[name].partition(".")[0]
        try:
            value = getattr(importlib.import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            if error.name != owner:
                raise
            what = f"{name} is that of {owner}, which is not installed."
            raise MissingExtraError(what, extra=owner) from None
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    public = sorted(name for name, home in homes.items() if home.partition(".")[0] in installed)
    return get, lambda: sorted({*vars(sys.modules[package]), *public}), public
