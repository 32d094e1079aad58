"""Of which files a recipe consists and which edits count; the options that it reads, and those that are paths."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_lib.base.paths import PathOptions
from trainer_lib.errors import ConfigError
from trainer_lib.protocol.recipe_names import ABOUT
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.spec import load_spec
from trainflow.tasks.code.closure import Closure, closure, find_root
from trainflow.tasks.code.reach import Code
from trainflow.tasks.configs import PrepareConfig, TrainConfig
from trainflow.tasks.keys import resolver as _resolver
from trainflow.tasks.keys.declared_paths import declared_paths, keyed_options, warn_of_unread
from trainflow.tasks.keys.resolver import Resolver

DOCUMENTED = 'def f():\n    "{}"\nprint(f.__doc__)\n'
PLUS = "def f(x):\n    return x + 1\n"
SPELT = "def prepare(options, out):\n    return rows(options['rows'], options.get('seed', 1))\n\ndef rows(n, s): ...\n"
ODD, PATIENT = PrepareConfig(options={"row": 1, "seed": 2}), TrainConfig(options={"patience": 3})


def write(root: Path, **files: str) -> Path:
    """Write files named by keyword, ``a__b`` meaning a/b.py; the path of recipe.py."""
    for name, text in files.items():
        path = root.joinpath(*name.removesuffix("__init__").split("__"))
        path = path / "__init__.py" if name.endswith("__init__") else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "recipe.py"


PACKAGE = dict.fromkeys(
    ("pack____init__", "pack__mod", "pack__two", "pack__sub____init__", "pack__sub__mod"), "value = 1"
)
CYCLE = {
    "pack__a": "from . import b\nfrom .sub.c import x",
    "pack__b": "from .a import y\nimport pack.a",
    "pack__sub__c": "from ..b import z\nfrom .. import d",
    "pack__d": "",
}


@pytest.mark.parametrize(
    ("recipe", "files", "expected"),
    [
        (
            "import os, numpy\nimport helper\n\ndef f():\n    from deep.inner import thing\n",
            {"helper": "import other", "other": "", "unused": "", "deep__inner": ""},
            {"helper", "other", "deep/inner"},
        ),
        ("import pack.sub.mod", PACKAGE, {"pack/__init__", "pack/sub/__init__", "pack/sub/mod"}),
        ("from pack import value, mod", PACKAGE, {"pack/__init__", "pack/mod"}),
        ("from pack import *", PACKAGE, {"pack/__init__", "pack/mod", "pack/two"}),
        ("import pack.a", {"pack____init__": "", **CYCLE}, {f"pack/{n}" for n in ("__init__", "a", "b", "d", "sub/c")}),
        ("import trainer_lib.data\nfrom trainflow import spec\n", {"trainflow__spec": ""}, set()),
    ],
    ids=["imports", "every init on the way", "modules and names", "star", "relative and cycles", "our own packages"],
)
def test_imports_are_followed_through_the_project_only(
    tmp_path: Path, recipe: str, files: dict[str, str], expected: set[str]
) -> None:
    found = set(closure(write(tmp_path, recipe=recipe, **files), tmp_path).files)
    assert found == {"recipe.py", *(f"{name}.py" for name in expected)}


def test_no_recipe_by_name_imports_what_only_a_run_knows(tmp_path: Path) -> None:
    imports = "\n".join(f"import trainer_lib.recipes.{name.replace('-', '_')}" for name in ABOUT)
    found = closure(write(tmp_path, recipe=imports), tmp_path)
    assert len(found.files) > len(ABOUT)
    assert not found.unseen, "all files of a project would count"


def test_nothing_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f"from pathlib import Path\nPath({str(marker)!r}).touch()\nimport helper\n"
    assert set(closure(write(tmp_path, recipe=text, helper=text), tmp_path).files) == {"recipe.py", "helper.py"}
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "other", "counts"),
    [
        (PLUS, f"# a comment\n{PLUS}", False),
        (PLUS, "def f( x ) :\n\n    return (x\n      + 1)\n", False),
        (PLUS, 'def f(x):\n    "What it does."\n    return x + 1\n', False),
        (PLUS, '"""Module."""\ndef f(x):\n    return x + 1  # why\n', False),
        (PLUS, "def f(x):\n    return x + 2\n", True),
        (PLUS, "def f(x):\n    return x + 1.0\n", True),
        (PLUS, "def f(x):\n    return x + True\n", True),
        (PLUS, "def g(x):\n    return x + 1\n", True),
        (PLUS, "def f(x):\n    return x - 1\n", True),
        (PLUS, "def f(x=None):\n    return x + 1\n", True),
        (PLUS, "def f(x, /):\n    return x + 1\n", True),
        (PLUS, f"async {PLUS}", True),
        (DOCUMENTED.format("a"), DOCUMENTED.format("b"), True),
    ],
)
def test_changes_of_meaning_count_and_comments_formatting_and_docstrings_do_not(
    tmp_path: Path, text: str, other: str, counts: bool
) -> None:
    before = closure(write(tmp_path, recipe=text), tmp_path)
    assert (closure(write(tmp_path, recipe=other), tmp_path) != before) == counts


def test_the_root_is_the_nearest_pyproject_else_the_specs_folder(tmp_path: Path) -> None:
    recipe = write(tmp_path / "a" / "b", recipe="")
    assert find_root(recipe, tmp_path / "a") == tmp_path / "a"
    assert find_root(recipe, tmp_path / "elsewhere") == tmp_path / "a" / "b"
    (tmp_path / "pyproject.toml").write_text("")
    assert find_root(recipe, tmp_path / "a") == tmp_path


@pytest.mark.parametrize("text", ["def f(:\n", "x = '\n", "\0", "(" * 300])
def test_what_is_not_python_is_named(tmp_path: Path, text: str) -> None:
    recipe = write(tmp_path, recipe="import helper", helper=text)
    with pytest.raises(ConfigError, match=r"helper\.py") as caught:
        closure(recipe, tmp_path, field="train.recipe")
    assert caught.value.field == "train.recipe"


def test_other_encodings_are_read(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_bytes("# -*- coding: latin-1 -*-\nx = '\xe9'\n".encode("latin-1"))
    latin = closure(recipe, tmp_path)
    recipe.write_text("x = 'é'\n", "utf-8")
    assert closure(recipe, tmp_path) == latin


def test_a_recipe_is_read_once_for_a_command_and_again_when_it_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[Path] = []

    def walk(recipe: Path, root: Path, **more: Any) -> Closure:
        walks.append(recipe)
        return closure(recipe, root, **more)

    monkeypatch.setattr(_resolver, "closure", walk)
    recipe, resolver = write(tmp_path, recipe="import helper", helper="x = 1"), Resolver()
    first = resolver.closure(recipe, tmp_path)
    assert resolver.closure(recipe, tmp_path) is first
    assert len(walks) == 1
    (tmp_path / "helper.py").write_text("x = 1234")
    assert resolver.closure(recipe, tmp_path) != first  # what evaluate's worker would load now
    assert len(walks) == 2


# -- options that are never read --------------------------------------------------------------------------------------


def code_of(folder: Path, recipe: str, **files: str) -> Code:
    return Resolver().code(write(folder, recipe=recipe, **files), None, folder)


@pytest.mark.parametrize(
    ("stage", "config", "recipe", "warnings"),
    [
        ("prepare-data", ODD, SPELT, ["The recipe never reads prepare.options.row. Did you mean 'rows'?"]),
        # A function that takes them is not there.
        ("train", PATIENT, SPELT, ["The recipe never reads train.options.patience."]),
        # Handed on as a whole, all may be read.
        *(
            ("prepare-data", ODD, f"def prepare(options, out):\n    {body}\n", [])
            for body in (
                "print(options)",
                "f(**options)",
                "[options[n] for n in names]",
                "dict(options)",
                "options.items()",
                "eval('options')",
            )
        ),
    ],
)
def test_options_that_are_never_read_are_named(
    tmp_path: Path, stage: str, config: Any, recipe: str, warnings: list[str]
) -> None:
    assert list(warn_of_unread(stage, stage.partition("-")[0], config, code_of(tmp_path, recipe))) == warnings


# -- options that are declared to be paths ----------------------------------------------------------------------------
LAZY = "from __future__ import annotations\n"
HEAD = "from pathlib import Path\nfrom typing import Annotated, NotRequired, TypedDict\n"
PREPARE = "def prepare(options: Options, out):\n    return {}\n"
KINDS = f"{HEAD}class Options(TypedDict):\n    images: Path\n\n{PREPARE}"
INNER = f"{HEAD}class Inner(TypedDict):\n    a: Path\n    b: int\nclass Options(TypedDict):\n    x: Inner\n{PREPARE}"
IMAGES, NONE = {"images": True}, dict[str, bool]()


def field(kind: str) -> str:
    return f"{HEAD}class Options(TypedDict):\n    images: {kind}\n\n{PREPARE}"


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        *((field(kind), IMAGES) for kind in ("Path", "'Path'", "Path | None", "NotRequired[Path]", "list[Path]")),
        (field("dict[str, 'Path']"), IMAGES),
        *((field(kind), NONE) for kind in ("str", "Literal['Path']", "unknown.Path", "'Options'")),
        ("class Options:\n    images: Path\n" + PREPARE, NONE),
        ("def prepare(options, out): ...\n", NONE),
        (INNER, {"x": {"a": True}}),
        # The declaration may stand anywhere in the project.
        (f"from kinds import Options\n{PREPARE}", IMAGES),
        (f"import kinds\n{PREPARE.replace('Options', 'kinds.Options')}", IMAGES),
        ("from kinds import prepare\n", IMAGES),
        (
            "from __future__ import annotations\nfrom kinds import Options as O\n" + PREPARE.replace("Options", "O"),
            IMAGES,
        ),
        (f"{HEAD}Images = list[Path]\nclass Options(TypedDict):\n    images: Images\n{PREPARE}", IMAGES),
        (f"import kinds\nclass Options(kinds.Options):\n    rows: int\n{PREPARE}", IMAGES),
        (f"{HEAD}class Options(TypedDict):\n    images: Annotated[Path, 'a folder']\n{PREPARE}", IMAGES),
        (f"{HEAD}class Options(TypedDict):\n    images: Annotated[Path, '.jinja']\n{PREPARE}", {"images": ".jinja"}),
    ],
)
def test_fields_that_are_paths_or_made_of_paths_are_found(
    tmp_path: Path, recipe: str, expected: dict[str, Any]
) -> None:
    assert declared_paths(code_of(tmp_path, recipe, kinds=KINDS), {"prepare": 0}) == expected


def test_paths_within_options_are_resolved() -> None:
    given = {"x": {"a": "t.csv", "b": "t.csv"}, "y": "t.csv"}
    found = PathOptions("/data").resolved(given, {"x": {"a": True}})
    assert found == {"x": {"a": Path("/data/t.csv"), "b": "t.csv"}, "y": "t.csv"}
    named = PathOptions("/data").resolved(
        {"x": "t.jinja", "y": "chatml", "z": "{{ x }}"}, dict.fromkeys("xyz", ".jinja")
    )
    assert named == {"x": Path("/data/t.jinja"), "y": "chatml", "z": "{{ x }}"}


def test_a_template_is_keyed_by_what_it_says(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(sources=())
    values, declared = {"template": "chat.jinja"}, {"template": ".jinja"}

    def keyed(text: str) -> Any:
        (tmp_path / "chat.jinja").write_text(text)
        return keyed_options(values, declared, str(tmp_path), context)["template"]

    assert keyed("a") == keyed("a") != keyed("b")
    assert keyed("a")["path"] == "chat.jinja"


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
    [source] = fields["sources"]
    assert fields["options"]["images"] == {**source, "below": "images"}
    assert fields["options"]["more"] == [{"path": "../b"}, "s3://bucket/x"]
    assert fields["options"]["note"] == "data/images"
    assert one.early_keys["train"].fields["model"] == {"vocabulary": {"path": "vocab.txt"}, "width": 3}
    # The declaration changes what the recipe gets, so it changes the key, also where no annotation is executed.
    digests = set()
    for recipe in (RECIPE, RECIPE.replace("images: Path", "images: str")):
        write(tmp_path / "one", recipe=LAZY + recipe)
        digests.add(Plan.of(load_spec(tmp_path / "one" / "pipeline.yaml")).early_keys["prepare-data"].digest)
    assert len(digests) == 2


def test_an_overridden_path_starts_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project(tmp_path / "one")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    spec = load_spec(path, ["prepare.options.images=x", "prepare.options.note=y", "train.model.vocabulary=~/v"])
    options = spec.prepare.options
    assert (options["images"], options["more"], options["note"]) == ("../here/x", ["../b", "s3://bucket/x"], "y")
    assert (spec.train.model["vocabulary"], spec.folder) == ("~/v", str(tmp_path / "one"))
    whole = load_spec(path, ["train.model={vocabulary: v, width: 4}"])
    assert whole.train.model == {"vocabulary": "../here/v", "width": 4}
    monkeypatch.chdir("/")
