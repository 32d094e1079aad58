"""Options that a recipe declares to be paths: how they are found, resolved and keyed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.plan import Plan
from flows.spec.spec import load_spec
from tasks.stage.declared_paths import declared_paths
from tasks.stage.resolver import Resolver
from trainer_lib.path_options import PathOptions

HEAD = "from pathlib import Path\nfrom typing import NotRequired, TypedDict\n"
PREPARE = "def prepare(options: Options, out):\n    return {}\n"
SPEC = """
name: paths
recipe: recipe.py
storage: store
prepare:
  sources: [data]
  options: {images: data/images, more: [../b, 's3://bucket/x'], rows: 5, note: data/images}
train:
  model: {vocabulary: vocab.txt, width: 3}
  args: {use_cpu: true}
"""
RECIPE = f"""{HEAD}
class Base(TypedDict, total=False):
    more: list[Path]

class Options(Base):
    images: Path
    rows: int
    note: str

class Model(TypedDict):
    vocabulary: "NotRequired[Path | None]"

def prepare(options: Options, out): ...
def build_model(options: Model, data): ...
"""


def declared(folder: Path, recipe: str, **files: str) -> dict[str, Any]:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "recipe.py").write_text(recipe)
    code = Resolver().code(folder / "recipe.py", None, folder)
    return declared_paths(code, {"prepare": 0})


@pytest.mark.parametrize(
    ("field", "is_path"),
    [
        ("Path", True),
        ("'Path'", True),
        ("Path | None", True),
        ("NotRequired[Path]", True),
        ("list[Path]", True),
        ("dict[str, 'Path']", True),
        ("str", False),
        ("Literal['Path']", False),
        ("unknown.Path", False),
    ],
)
def test_a_field_that_is_a_path_or_made_of_paths(tmp_path: Path, field: str, is_path: bool) -> None:
    found = declared(tmp_path, f"{HEAD}class Options(TypedDict):\n    images: {field}\n\n{PREPARE}")
    assert found == ({"images": True} if is_path else {})


@pytest.mark.parametrize(
    ("recipe", "files"),
    [
        (f"from kinds import Options\n{PREPARE}", {}),
        (f"import kinds\n{PREPARE.replace('Options', 'kinds.Options')}", {}),
        ("from kinds import prepare\n", {}),
        (f"from __future__ import annotations\nfrom kinds import Options as O\n{PREPARE.replace('Options', 'O')}", {}),
        (
            f"import pathlib as p, typing\nOptions = typing.TypedDict('O', {{'images': p.Path}})\n{PREPARE}",
            {},
        ),
        (f"{HEAD}Images = list[Path]\nclass Options(TypedDict):\n    images: Images\n{PREPARE}", {}),
        (f"import kinds\nclass Options(kinds.Options):\n    rows: int\n{PREPARE}", {}),
    ],
)
def test_the_declaration_may_stand_anywhere_in_the_project(tmp_path: Path, recipe: str, files: dict[str, str]) -> None:
    kinds = f"{HEAD}class Options(TypedDict):\n    images: Path\n\n{PREPARE}"
    assert declared(tmp_path, recipe, kinds=kinds, **files) == {"images": True}


def test_options_within_options_and_no_declaration(tmp_path: Path) -> None:
    nested = (
        f"{HEAD}class Inner(TypedDict):\n    a: Path\n    b: int\nclass Options(TypedDict):\n    x: Inner\n{PREPARE}"
    )
    found = declared(tmp_path, nested)
    assert found == {"x": {"a": True}}
    given = {"x": {"a": "t.csv", "b": "t.csv"}, "y": "t.csv"}
    assert PathOptions("/data").resolved(given, found) == {"x": {"a": Path("/data/t.csv"), "b": "t.csv"}, "y": "t.csv"}
    assert declared(tmp_path, "class Options:\n    images: Path\n" + PREPARE) == {}
    assert declared(tmp_path, "def prepare(options, out): ...\n") == {}
    assert declared(tmp_path, f"{HEAD}class Options(TypedDict):\n    images: 'Options'\n{PREPARE}") == {}


def project(folder: Path) -> Path:
    (folder / "data" / "images").mkdir(parents=True)
    (folder / "data" / "images" / "a.txt").write_text("a")
    (folder / "pyproject.toml").write_text("")
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "pipeline.yaml").write_text(SPEC)
    return folder / "pipeline.yaml"


def test_a_key_holds_no_folder_of_this_machine_and_the_content_of_sources(tmp_path: Path) -> None:
    one, other = Plan.of(load_spec(project(tmp_path / "one"))), Plan.of(load_spec(project(tmp_path / "b" / "other")))
    assert one.pipeline_key == other.pipeline_key
    fields = one.early_keys["prepare-data"].fields
    images, [source] = fields["options"]["images"], fields["sources"]
    assert images == {**source, "below": "images"}
    assert fields["options"]["more"] == [{"path": "../b"}, "s3://bucket/x"]
    assert fields["options"]["note"] == "data/images"
    model = one.early_keys["train"].fields["model"]
    assert model == {"vocabulary": {"path": "vocab.txt"}, "width": 3}
    # The declaration changes what the recipe gets, so it changes the key, also where no annotation is executed.
    recipe = tmp_path / "one" / "recipe.py"
    recipe.write_text("from __future__ import annotations\n" + RECIPE)
    typed = Plan.of(load_spec(tmp_path / "one" / "pipeline.yaml")).early_keys["prepare-data"]
    recipe.write_text("from __future__ import annotations\n" + RECIPE.replace("images: Path", "images: str"))
    untyped = Plan.of(load_spec(tmp_path / "one" / "pipeline.yaml")).early_keys["prepare-data"]
    assert typed.digest != untyped.digest


def test_an_overridden_path_starts_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project(tmp_path / "one")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    spec = load_spec(path, ["prepare.options.images=x", "prepare.options.note=y", "train.model.vocabulary=~/v"])
    assert spec.prepare.options["images"] == "../here/x"
    assert spec.prepare.options["more"] == ["../b", "s3://bucket/x"]
    assert spec.prepare.options["note"] == "y"
    assert spec.train.model["vocabulary"] == "~/v"
    assert spec.folder == str(tmp_path / "one")
    whole = load_spec(path, ["train.model={vocabulary: v, width: 4}"])
    assert whole.train.model == {"vocabulary": "../here/v", "width": 4}
    monkeypatch.chdir("/")
