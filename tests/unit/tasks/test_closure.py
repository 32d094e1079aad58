"""Which files a recipe consists of, and which edits count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.stage import resolver as _resolver
from tasks.stage.closure import Closure, closure, find_root
from trainer_lib.errors import ConfigError


def write(root: Path, **files: str) -> Path:
    """Write files named by keyword, ``a__b`` meaning a/b.py; the path of recipe.py."""
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "recipe.py"


def names(root: Path, **files: str) -> set[str]:
    return set(closure(write(root, **files), root).files)


def test_imports_are_followed_through_the_project_only(tmp_path: Path) -> None:
    found = names(
        tmp_path,
        recipe="import os, numpy\nimport helper\n\ndef f():\n    from deep.inner import thing\n",
        helper="import other",
        other="",
        unused="",
        deep__inner="",
    )
    assert found == {"recipe.py", "helper.py", "other.py", "deep/inner.py"}


def test_a_package_counts_with_every_init_on_the_way(tmp_path: Path) -> None:
    files = {"recipe": "import pack.sub.mod", "pack____init__": "", "pack__sub____init__": "", "pack__sub__mod": ""}
    write(tmp_path, recipe=files["recipe"])
    for name in ("pack/__init__.py", "pack/sub/__init__.py", "pack/sub/mod.py", "pack/sub/unused.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert set(closure(tmp_path / "recipe.py", tmp_path).files) == {
        "recipe.py",
        "pack/__init__.py",
        "pack/sub/__init__.py",
        "pack/sub/mod.py",
    }


def test_from_imports_find_modules_and_names(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("value = 1")
    (tmp_path / "pack" / "mod.py").write_text("")
    recipe = write(tmp_path, recipe="from pack import value, mod")
    assert set(closure(recipe, tmp_path).files) == {"recipe.py", "pack/__init__.py", "pack/mod.py"}


def test_relative_imports_and_cycles(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    (pack / "sub").mkdir(parents=True)
    (pack / "__init__.py").write_text("")
    (pack / "a.py").write_text("from . import b\nfrom .sub.c import x")
    (pack / "b.py").write_text("from .a import y\nimport pack.a")
    (pack / "sub" / "c.py").write_text("from ..b import z\nfrom .. import d")
    (pack / "d.py").write_text("")
    recipe = write(tmp_path, recipe="import pack.a")
    assert set(closure(recipe, tmp_path).files) == {
        "recipe.py",
        *(f"pack/{name}.py" for name in ("__init__", "a", "b", "d", "sub/c")),
    }


def test_a_star_import_counts_the_whole_package(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    for name in ("__init__", "one", "two"):
        (tmp_path / "pack" / f"{name}.py").write_text("")
    recipe = write(tmp_path, recipe="from pack import *")
    assert {"pack/one.py", "pack/two.py"} < set(closure(recipe, tmp_path).files)


def test_modules_named_at_run_time_are_followed_or_said(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        recipe="import importlib\nimportlib.import_module('known')\nname = input()\nimportlib.import_module(name)\n",
        known="",
    )
    found = closure(recipe, tmp_path)
    assert "known.py" in found.files
    assert found.unseen == ("recipe.py:4",)


def test_our_own_packages_are_not_part_of_a_project(tmp_path: Path) -> None:
    assert names(tmp_path, recipe="import trainer_lib.data\nfrom flows import spec\n", flows__spec="") == {"recipe.py"}


def test_nothing_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f"from pathlib import Path\nPath({str(marker)!r}).touch()\nimport helper\n"
    assert names(tmp_path, recipe=text, helper=text) == {"recipe.py", "helper.py"}
    assert not marker.exists()


@pytest.mark.parametrize(
    "other",
    [
        "# a comment\ndef f(x):\n    return x + 1\n",
        "def f( x ) :\n\n    return (x\n      + 1)\n",
        'def f(x):\n    "What it does."\n    return x + 1\n',
        '"""Module."""\ndef f(x):\n    return x + 1  # why\n',
    ],
)
def test_comments_formatting_and_docstrings_do_not_count(tmp_path: Path, other: str) -> None:
    before = closure(write(tmp_path, recipe="def f(x):\n    return x + 1\n"), tmp_path)
    assert closure(write(tmp_path, recipe=other), tmp_path) == before


@pytest.mark.parametrize(
    "other",
    [
        "def f(x):\n    return x + 2\n",
        "def f(x):\n    return x + 1.0\n",
        "def f(x):\n    return x + True\n",
        "def g(x):\n    return x + 1\n",
        "def f(x):\n    return x - 1\n",
        "def f(x=None):\n    return x + 1\n",
        "def f(x, /):\n    return x + 1\n",
        "async def f(x):\n    return x + 1\n",
    ],
)
def test_every_change_of_meaning_counts(tmp_path: Path, other: str) -> None:
    before = closure(write(tmp_path, recipe="def f(x):\n    return x + 1\n"), tmp_path)
    assert closure(write(tmp_path, recipe=other), tmp_path) != before


def test_a_docstring_counts_where_docstrings_are_read(tmp_path: Path) -> None:
    text = 'def f():\n    "{}"\nprint(f.__doc__)\n'
    before = closure(write(tmp_path, recipe=text.format("a")), tmp_path)
    assert closure(write(tmp_path, recipe=text.format("b")), tmp_path) != before


def test_an_edit_of_an_imported_file_names_that_file(tmp_path: Path) -> None:
    before = closure(write(tmp_path, recipe="import helper", helper="x = 1"), tmp_path).files
    after = closure(write(tmp_path, helper="x = 2") and tmp_path / "recipe.py", tmp_path).files
    assert [name for name in after if after[name] != before[name]] == ["helper.py"]


def test_the_place_of_the_project_does_not_count(tmp_path: Path) -> None:
    files = {"recipe": "import helper", "helper": "x = 1"}
    one = closure(write(tmp_path / "one", **files), tmp_path / "one")
    assert closure(write(tmp_path / "two", **files), tmp_path / "two") == one


def test_the_root_is_the_nearest_pyproject_else_the_specs_folder(tmp_path: Path) -> None:
    recipe = write(tmp_path / "a" / "b", recipe="")
    assert find_root(recipe, tmp_path / "a") == tmp_path / "a"
    assert find_root(recipe, tmp_path / "elsewhere") == tmp_path / "a" / "b"
    (tmp_path / "pyproject.toml").write_text("")
    assert find_root(recipe, tmp_path / "a") == tmp_path


@pytest.mark.parametrize("text", ["def f(:\n", "x = '\n", "\0", "(" * 300])
def test_what_is_not_python_is_named(tmp_path: Path, text: str) -> None:
    recipe = write(tmp_path, recipe="import helper", helper=text)
    with pytest.raises(ConfigError) as caught:
        closure(recipe, tmp_path, field="train.recipe")
    assert caught.value.field == "train.recipe"
    assert "helper.py" in str(caught.value)


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

    def walk(recipe: Path, root: Path, *, field: str) -> Closure:
        walks.append(recipe)
        return closure(recipe, root, field=field)

    monkeypatch.setattr(_resolver, "closure", walk)
    recipe, resolver = write(tmp_path, recipe="import helper", helper="x = 1"), _resolver.Resolver()
    first = resolver.closure(recipe, tmp_path)
    assert resolver.closure(recipe, tmp_path) is first
    assert len(walks) == 1
    (tmp_path / "helper.py").write_text("x = 1234")
    assert resolver.closure(recipe, tmp_path) != first  # what evaluate's worker would load now
    assert len(walks) == 2
