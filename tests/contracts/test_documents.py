"""What README and docs say is there: every link leads somewhere, every command and option exists."""

from __future__ import annotations

import functools
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.repository import ROOT, relative

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        ROOT / "tests/README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("README.md"),
    ]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
ANCHOR = re.compile(r'<a id="([^"]+)">')
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
#: A command in a block of code, fenced or indented, or between backticks.
COMMAND = re.compile(r"(?:^(?: {4,}|\$ | {4,}\$ )|`)(?:\.venv/bin/)?(trainflow [^`\n]+)", re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = HEADING.findall(text)
    plain = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain} | set(
        ANCHOR.findall(text)
    )


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            dead.append(link)
    assert dead == []


@functools.cache
def _command_line() -> Any:
    from flows.cli.main import application

    return typer.main.get_command(application())


def _commands(page: Path) -> Iterator[list[str]]:
    blocks = FENCE.sub(lambda block: textwrap.indent(block[0], "    "), page.read_text(encoding="utf-8"))
    for text in COMMAND.findall(blocks):
        line = re.split(r" +#|\\$| && | \| | > |;|…|\.\.\.", text)[0]
        try:
            words = shlex.split(line)
        except ValueError:
            continue  # half a command in running text
        # Several at once: `trainflow lineage X`, `verify X`.
        yield [word.strip("[],.") for word in words[1:]]


def _wrong(words: list[str]) -> str | None:
    """What is wrong with the words of a command; None: nothing."""
    command = _command_line()
    rest = list(words)
    while hasattr(command, "commands"):
        if not rest or rest[0].startswith("-") or not rest[0].isascii():
            return None
        found = command.commands.get(rest[0].split("|")[0])
        if found is None:
            return f"no command '{rest[0]}'"
        command, rest = found, rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    strange = [word for word in rest if word.startswith("--") and word.split("=")[0] not in known]
    return f"{command.name} has no {', '.join(strange)}" if strange else None


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_command_exists(page: Path) -> None:
    assert [" ".join(words) + ": " + why for words in _commands(page) if (why := _wrong(words))] == []
