"""Which spec a command takes when none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli.spec_choice import choose_spec_file
from trainer_lib.errors import ConfigError

SPEC = "name: toy\nrecipe: recipe.py\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conda.yaml").write_text("name: toy\ndependencies: []\n")
    Path("data.json").write_text("[1, 2]")


def test_what_is_named_is_taken() -> None:
    Path("pipeline.yaml").write_text(SPEC)
    assert choose_spec_file(Path("other.yaml"), ["a=1"]) == (Path("other.yaml"), ["a=1"])
    assert choose_spec_file(Path("absent"), None) == (Path("absent"), [])


def test_the_only_spec_of_the_folder_is_taken() -> None:
    Path("digits.yml").write_text(SPEC)
    assert choose_spec_file(None, None) == (Path("digits.yml"), [])
    Path("other.yaml").write_text(SPEC)
    with pytest.raises(ConfigError, match=r"several: digits\.yml, other\.yaml"):
        choose_spec_file(None, None)
    Path("pipeline.yaml").write_text(SPEC)
    assert choose_spec_file(None, None) == (Path("pipeline.yaml"), [])


def test_the_first_word_may_be_an_override() -> None:
    Path("pipeline.yaml").write_text(SPEC)
    assert choose_spec_file(Path("train.args.seed=1"), ["a=2"]) == (Path("pipeline.yaml"), ["train.args.seed=1", "a=2"])
    Path("lr=1.yaml").write_text(SPEC)
    assert choose_spec_file(Path("lr=1.yaml"), None) == (Path("lr=1.yaml"), [])


def test_a_folder_without_a_spec_says_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match=r"(?s)has none.*trainflow init NAME"):
        choose_spec_file(None, ["a=1"])
