"""Recipes by name: found from a spec, replaced function by function, and covered by keys on every machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.recipe_edits import reach_of
from trainer_lib.base.yaml_text import dump_yaml
from trainer_lib.errors import ConfigError
from trainer_lib.protocol import recipe_names
from trainer_lib.protocol.recipe_names import ABOUT, FOLDER, recipe_file, recipe_name
from trainer_lib.recipes import load
from trainflow.flows.spec.spec import load_spec, parse_spec
from trainflow.tasks.code import closure
from trainflow.tasks.keys import stage_code
from trainflow.tasks.keys.resolver import Resolver

STAR = "from trainer_lib.recipes.tabular_classification import *\n"
MINE = STAR + "\n\ndef build_model(options, data):\n    return 'mine'\n"
Digests = dict[str, dict[str, dict[str, str]]]


def spec(folder: Path, recipe: str) -> Path:
    path = folder / "pipeline.yaml"
    path.write_text(f"name: named\nrecipe: {recipe}\nstorage: store\n")
    return path


@pytest.mark.parametrize("name", sorted(ABOUT))
def test_a_spec_names_a_recipe_nothing_of_which_runs_at_import(tmp_path: Path, name: str) -> None:
    found = load_spec(spec(tmp_path, name))
    assert found.recipe == recipe_file(name)
    assert Path(found.recipe).is_file()
    assert found.root == str(tmp_path), "the project is that around the spec"
    record = found.to_record()
    assert record["recipe"] == name, "another machine has it elsewhere"
    assert parse_spec(record).recipe == found.recipe
    assert f"recipe: {name}\n" in dump_yaml(record)
    assert recipe_name(found.recipe) == name
    code = Resolver().code(recipe_file(name), None, tmp_path)
    constants = {
        f"(trainflow)/tables/splitting.py:{name}" for name in ("_CLOCKS", "_CLOCK_FORMATS", "import itertools")
    }
    assert {piece.label for piece in code.at_import.pieces} <= constants, "it would count for every stage"
    assert len(code.program.modules) > 3, "keys follow into what recipes share"
    assert all(file.startswith("(trainflow)/") for file in code.program.modules)
    assert all(each.everything is None for each in reach_of(code).values())


def test_an_unknown_name_is_refused_with_the_nearest_and_a_file_of_that_form_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No recipe has this name") as caught:
        load_spec(spec(tmp_path, "tabular-clasification"))
    assert 'Did you mean "tabular-classification"?' in str(caught.value.remedy)
    assert caught.value.field == "recipe"
    (tmp_path / "tabular-classification").write_text("")
    with pytest.raises(ConfigError, match="Python file"):
        load_spec(spec(tmp_path, "tabular-classification"))


def test_a_stage_may_have_a_recipe_by_name_and_the_pipeline_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def compute_metrics(p):\n    return {'zero': 0.0}\n")
    path = spec(tmp_path, "tabular-classification")
    path.write_text(path.read_text() + "evaluate: {recipe: mine.py}\n")
    found = load_spec(path)
    code = Resolver().code(str(found.evaluate.recipe), found.recipe, found.root)
    labels = code.reach(stage_code.EVALUATE).digests
    assert "mine.py:compute_metrics" in labels
    assert "(trainflow)/tabular_classification.py:build_model" in labels
    assert "(trainflow)/tabular_classification.py:compute_metrics" not in labels


def test_a_function_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    load_spec(spec(tmp_path, "mine.py"))
    recipe = load(tmp_path / "mine.py", tmp_path)
    assert recipe.build_model({}, None) == "mine"  # type: ignore[arg-type]
    assert recipe.collate is not None
    assert recipe.compute_metrics is not None
    found = reach_of(Resolver().code(tmp_path / "mine.py", None, tmp_path))
    assert "mine.py:build_model" in found["train"].digests
    assert "(trainflow)/tabular_classification.py:collate" in found["train"].digests
    assert not any("Classifier" in label for label in found["train"].digests), "the network is not used any more"
    assert not any(label.endswith(":prepare") for label in found["train"].digests)
    prepares = found["prepare-data"].digests
    whole = {label: digest for label, digest in prepares.items() if not label.startswith("mine.py:")}
    of_ours = reach_of(Resolver().code(recipe_file("tabular-classification"), None, tmp_path))
    assert whole == of_ours["prepare-data"].digests


def _copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the recipes, which counts as the installed one, beside a file of the user that imports one of them."""
    copy = folder / "lib" / "recipes"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for module in (recipe_names, closure):
        monkeypatch.setattr(module, "FOLDER", copy)
    (copy.parent / "mine.py").write_text(STAR)
    return copy


def _digests(recipe: Path, project: Path) -> dict[str, dict[str, str]]:
    return {stage: dict(each.digests) for stage, each in reach_of(Resolver().code(recipe, None, project)).items()}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """What the keys cover before any edit; by the file's name."""
    with pytest.MonkeyPatch.context() as patch:
        copy = _copied(tmp_path_factory.mktemp("before"), patch)
        files = (copy / "tabular_classification.py", copy.parent / "mine.py")
        return {file.name: _digests(file, copy.parent / "project") for file in files}


@pytest.mark.parametrize(
    ("file", "old", "new", "runs"),
    [
        ("tables/splitting.py", "draw.shuffle(chosen)", "chosen.sort()", {"prepare-data"}),
        ("tabular_classification.py", "nn.GELU()", "nn.ReLU()", {"train", "evaluate", "predict"}),
        ("shared/targets.py", "of_whole.argmax()", "of_whole.argmin()", {"evaluate"}),
        ("shared/targets.py", '"confidence"', '"sure"', {"predict"}),
    ],
)
def test_an_edit_of_trainflows_own_recipe_counts_where_it_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Digests, file: str, old: str, new: str, runs: set[str]
) -> None:
    edited = _copied(tmp_path, monkeypatch)
    text = (edited / file).read_text()
    assert old in text
    (edited / file).write_text(text.replace(old, new))
    also = [(edited.parent / "mine.py", "imported by a file of the user")] if "GELU" in old else []
    for path, label in ((edited / "tabular_classification.py", "itself"), *also):
        after = _digests(path, edited.parent / "project")
        assert {stage for stage in after if before[path.name][stage] != after[stage]} == runs, label
