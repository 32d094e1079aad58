"""Which spec a command takes when none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli.run_choice import choose_place
from flows.cli.spec_choice import choose_spec_file, choose_spec_or_storage
from tests.support.toy import project
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


def test_data_of_many_bytes_is_not_read_as_a_spec() -> None:
    Path("digits.yml").write_text(SPEC)
    Path("rows.json").write_text('{"name": "rows", "recipe": "x", "rows": "' + "x" * 1_000_000 + '"}')
    assert choose_spec_file(None, None) == (Path("digits.yml"), [])


def test_commands_that_read_runs_mean_the_same_spec_as_those_that_make_them() -> None:
    assert choose_spec_or_storage(None, None, None) == (None, [], None)
    Path(".trainflow").mkdir()
    assert choose_spec_or_storage(None, None, None) == (None, [], ".trainflow")
    Path("digits.yml").write_text(SPEC)
    assert choose_spec_or_storage(None, None, None) == (Path("digits.yml"), [], None)
    assert choose_spec_or_storage(Path("storage=s"), ["a=1"], None) == (Path("digits.yml"), ["storage=s", "a=1"], None)
    assert choose_spec_or_storage(None, None, "store") == (None, [], "store")
    for spec, overrides in ((Path("digits.yml"), None), (Path("a=1"), None), (None, ["a=1"])):
        with pytest.raises(ConfigError, match="not both"):
            choose_spec_or_storage(spec, overrides, "store")
    Path("digits.yml").unlink()
    with pytest.raises(ConfigError, match="has none"):
        choose_spec_or_storage(Path("a=1"), None, None)


def test_a_storage_that_is_named_has_to_be_there() -> None:
    Path("store").mkdir()
    assert choose_place(None, "store", command="runs").storage == str(Path("store").absolute())
    with pytest.raises(ConfigError, match="no such folder") as caught:
        choose_place(None, "stroe", command="runs")
    assert (caught.value.field, caught.value.value) == ("--storage", "stroe")
    assert caught.value.remedy == 'Did you mean "store"?'
    with pytest.raises(ConfigError, match="no such folder") as caught:
        choose_place(None, "elsewhere/far", command="runs")
    assert "that a run used" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="a file, not a folder"):
        choose_place(None, "data.json", command="gc")


def test_the_storage_of_a_spec_may_be_one_of_runs_to_come(tmp_path: Path) -> None:
    spec = project(tmp_path / "project")
    assert choose_place([str(spec)], None, command="runs").storage == str(spec.parent / "store")
    assert not (spec.parent / "store").exists()
