"""Gathers the pages of the site: those of `docs`, and every file of the repository that a page links to.

A page stays the Markdown that it is. A link that leads out of `docs` leads to a copy below `repository/`: a Markdown
file is a page, another text a page that shows it, a folder its README and a list of its files. So the site is whole,
and needs no other server.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Code, in which nothing is a link; and the target of a link or a picture.
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".j2": "jinja"}
# Copies are found by their pages, not by the search.
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
_LARGEST_SHOWN = 100_000
_PICTURES = {".svg", ".png"}


def gather(folder: Path) -> None:
    """Write all pages into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    todo = [path for path in sorted(DOCS.rglob("*")) if path.suffix in {".md", *_PICTURES}]
    todo += [ROOT / name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    done: set[Path] = set()
    while todo:
        source = todo.pop()
        if source in done:
            continue
        done.add(source)
        target = folder / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        is_large = source.is_file() and source.suffix != ".md" and source.stat().st_size > _LARGEST_SHOWN
        if source.suffix in _PICTURES or is_large:
            shutil.copyfile(source, target)
            continue
        text, linked = _page(source)
        target.write_text(text, "utf-8")
        todo += linked


def place(source: Path) -> Path:
    """The place of a repository's file or folder in the site's sources."""
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS)
    copy = Path("repository") / source.relative_to(ROOT)
    if source.is_dir():
        return copy / "README.md"
    shown = source.suffix not in {".md", *_PICTURES} and source.stat().st_size <= _LARGEST_SHOWN
    return copy.with_name(copy.name + ".md") if shown else copy


def _page(source: Path) -> tuple[str, list[Path]]:
    """The text of a page, and what it links to."""
    ours = source.is_relative_to(DOCS)
    if source.is_dir():
        readme = source / "README.md"
        text = readme.read_text("utf-8") if readme.exists() else f"# {source.relative_to(ROOT)}\n"
        files = [path for path in sorted(source.iterdir()) if path.is_file() and path != readme]
        text += "\n## Files\n\n" + "".join(f"- [{path.name}]({path.name})\n" for path in files)
        folder = source
    elif source.suffix == ".md":
        text, folder = source.read_text("utf-8"), source.parent
    else:
        language = _LANGUAGES.get(source.suffix, "text")
        body = source.read_text("utf-8").rstrip()
        return f"{_UNSEARCHED}# {source.relative_to(ROOT)}\n\n````{language}\n{body}\n````\n", []
    linked: list[Path] = []
    pieces = []
    for piece, is_code in _pieces(text):
        pieces.append(piece if is_code else _LINK.sub(lambda link: _lead(link[1], folder, source, linked), piece))
    return ("" if ours or source.parent == ROOT else _UNSEARCHED) + "".join(pieces), linked


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """The text in order, cut into code and what is not code."""
    end = 0
    for code in _CODE.finditer(text):
        yield text[end : code.start()], False
        yield code[0], True
        end = code.end()
    yield text[end:], False


def _lead(link: str, folder: Path, page: Path, linked: list[Path]) -> str:
    """The link as it is in the site; what it leads to is appended to `linked`."""
    if "://" in link or link.startswith("mailto:"):
        return link
    target = Path(os.path.normpath(folder / link))
    if target.name == "README.md" and not target.is_relative_to(DOCS):
        target = target.parent
    linked.append(target)
    return Path(os.path.relpath(place(target), place(page).parent)).as_posix()
