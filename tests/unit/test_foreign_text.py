"""Text of strangers in each medium: no control character, no markup, no other direction, no endless line."""

from __future__ import annotations

import io

import pytest
from markdown_it import MarkdownIt

from flows.cli.terminal import _SafeConsole
from trainer_lib.foreign_text import to_cell, to_html, to_markdown, to_terminal

HOSTILE = (
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[31m",
    "\x9b31m",
    "a\rb\bc",
    "\u202eevil\u202c",
    "\u200f\u2066x\u2069",
    "\u2028line",
    "\ud800",
    "\x00\x7f",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "![x](https://example.org/pixel.png)",
    "[x](javascript:alert(1))",
    "``` \n# forged",
    "| cell | cell |",
    "</td></tr>",
    "<!-- trainflow:results -->",
    "x" * 10_000,
)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_steers_the_medium(text: str) -> None:
    for shown in (to_terminal(text), to_cell(text), to_markdown(text), to_html(text)):
        assert shown.replace("\n", "").isprintable()
        shown.encode()
    assert "\n" not in to_cell(text) and len(to_cell(text)) <= 1000
    assert "<" not in to_html(text) and "<" not in to_markdown(text)
    html = MarkdownIt("gfm-like", {"linkify": False}).render(f"| head |\n|---|\n| {to_markdown(text)} |\n")
    assert html.count("<td") == 1
    assert not [tag for tag in ("<script", "<img", "<a ", "<h1", "<pre", "<!--") if tag in html]


@pytest.mark.parametrize(
    "text", ["Käufer", "می\u200cخواهم", "👩\u200d🔬", "a\u00a0b", "日本\u3000語", "x\ty\nz", "eval_loss"]
)
def test_words_of_every_language_stay_as_they_are(text: str) -> None:
    assert to_terminal(text) == text


def test_a_console_keeps_its_own_colours_alone() -> None:
    out = io.StringIO()
    console = _SafeConsole(file=out, force_terminal=True, color_system="standard", markup=False, highlight=False)
    console.print("a\x1b[31mb", style="green")
    assert out.getvalue().removeprefix("\x1b[32m").replace("\x1b[0m", "").strip() == "a\\x1b[31mb"
