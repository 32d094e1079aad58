"""The site: built strictly, whole, and without a call to anybody's server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs.site import gather
from docs.site.__main__ import check_navigation
from tests.support.command import python

# What a browser fetches by itself; a link that a reader may follow is not.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=[\"']?((?:https?:)?//[^\s\"'>]+)"
    r"|<link[^>]+href=[\"']?((?:https?:)?//[^\s\"'>]+)"
    r"|url\([\"']?((?:https?:)?//[^)\"']+)|@import [\"']((?:https?:)?//[^\"']+)"
)
REFERENCE = {
    "commands": "trainflow prove-resume",
    "errors": "MissingExtraError",
    "arguments": "gradient_accumulation_steps",
    "trainer_lib": 'id="trainertrain"',
    "trainflow": 'id="spec"',
    "stages": 'id="stage_task"',
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, in a folder of its own."""
    to = tmp_path_factory.mktemp("site")
    done = python("-m", "docs.site", "--to", to)
    assert "No issues found" in done.stdout + done.stderr
    return to / "site"


def test_every_page_can_be_searched_and_the_reference_is_that_of_the_code(site: Path) -> None:
    for page in (path.relative_to(gather.DOCS) for path in gather.DOCS.rglob("*.md")):
        folder = page.parent if page.stem == "README" else page.with_suffix("")
        assert (site / folder / "index.html").is_file(), page
    entries = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    places = {each["location"].split("#")[0] for each in entries}
    assert {"tutorial/", "howto/csv/", "concepts/keys/", "reference/commands/", "reference/trainer_lib/"} <= places
    assert not any(location.startswith("repository/examples") for location in places)
    reference = {path.parent.name: path.read_text(encoding="utf-8") for path in site.glob("reference/*/index.html")}
    for name, text in REFERENCE.items():
        assert text in reference[name]
    assert "[positional or keyword]" not in reference["trainer_lib"]


def test_nothing_is_fetched_from_another_server(site: Path) -> None:
    assert FETCHED.search('<link rel="stylesheet" href="https://fonts.example/css">')
    assert FETCHED.search("<script src=//cdn.example/x.js></script>")
    assert not FETCHED.search('<a href="https://example.org">')
    files = [path for path in site.rglob("*") if path.suffix in {".html", ".css"}]
    assert len(files) > 60
    fetched = {(path.name, *found) for path in files for found in FETCHED.findall(path.read_text(encoding="utf-8"))}
    assert fetched == set()


def test_the_navigation_lists_every_page_and_no_other(tmp_path: Path) -> None:
    for name in ("README.md", "howto/csv.md", "repository/budget.toml.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# A page\n", "utf-8")
    start: list[Any] = [{"Start": [{"trainflow": "README.md"}]}]
    assert check_navigation([*start, {"CSV": "howto/csv.md"}], tmp_path) == []
    assert check_navigation([*start, "howto/tsv.md"], tmp_path) == [
        "zensical.toml: nav lists howto/tsv.md, which is no page.",
        "zensical.toml: nav lacks the page howto/csv.md.",
    ]


def test_a_link_out_of_docs_leads_to_a_copy(tmp_path: Path) -> None:
    gather.gather(tmp_path)
    page = (tmp_path / "python.md").read_text(encoding="utf-8")
    assert "(repository/examples/own_flow/flow.py.md)" in page
    assert "stage_task" in (tmp_path / "repository" / "examples" / "own_flow" / "flow.py.md").read_text(
        encoding="utf-8"
    )
    assert "(../docs" not in page
    long = (tmp_path / "repository" / "tests" / "data" / "compatibility.md").read_text(encoding="utf-8")
    assert "](../../../distributed.md#fsdp_config)" in long
    assert "](../../docs" not in long
