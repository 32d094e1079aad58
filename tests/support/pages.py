"""Pages of the documentation as what a reader does with them: their blocks of code, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code: its language, and its text without the indentation of a list."""

    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """What is typed in a console."""
        return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, by its path from docs/."""
    text = Path(ROOT / "docs" / page).read_text(encoding="utf-8")
    return [
        Block(language, re.sub(f"^{indent}", "", body, flags=re.MULTILINE))
        for indent, language, body in _BLOCK.findall(text)
    ]
