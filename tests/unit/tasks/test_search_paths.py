"""Modules from places that a project adds itself count like any other: sys.path, files loaded by path, PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tasks.stage import project_files, stage_code
from tasks.stage.closure import closure
from tasks.stage.code_changes import describe_code
from tasks.stage.keys import differences
from tasks.stage.reach import Code, Reach
from tasks.stage.resolver import Resolver

STAGES = {"prepare": stage_code.PREPARE, "train": stage_code.MODEL, "evaluate": stage_code.EVALUATE}
MODELS = {"train", "evaluate"}
ALL = {*STAGES}
PREPARE = "def prepare(options, out):\n    return {}\n\n\n"
NETS = "def build_model(options, data):\n    return 4\n"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def reach(recipe: Path, root: Path) -> dict[str, Reach]:
    code: Code = Resolver().code(recipe, None, root)
    return {stage: code.reach(functions) for stage, functions in STAGES.items()}


def edited(folder: Path, file: str, files: dict[str, str], *, recipe: str = "recipe.py") -> set[str]:
    """The stages that an edit of `file` runs again; `folder` is the project's root."""
    write(folder, files)
    before = reach(folder / recipe, folder)
    write(folder, {file: files[file].replace("return 4", "return 8")})
    after = reach(folder / recipe, folder)
    return {stage for stage in before if before[stage].digests != after[stage].digests}


FROM_LIB = "from nets import build_model\n\n\n"
INSERTS = [
    "import sys\nsys.path.insert(0, 'lib')",
    "import sys\nsys.path.append('./lib')",
    "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))",
    "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent / 'lib'))",
    "import sys\nfrom pathlib import Path\nHERE = Path(__file__).resolve().parents[0]\nsys.path += [str(HERE / 'lib')]",
    "import sys as system\nfrom pathlib import Path\nsystem.path.extend([f'{Path(__file__).parent}/lib', '/nowhere'])",
    "from sys import path\npath[:0] = ['lib']",
    "import sys\nsys.path = ['lib', *sys.path]",
    "import sys\nsys.path = ['lib'] + sys.path[1:]",
    "import sys\nfor folder in ('other', 'lib'):\n    if folder not in sys.path:\n        sys.path.insert(0, folder)",
    "import site\nsite.addsitedir('lib')",
    "import os, sys\nsys.path.insert(0, os.environ.get('LIBRARY_OF_TESTS', 'lib'))",
    "import sys\ndef add(folder):\n    sys.path.insert(0, folder)\nadd('lib')",
    "import sys\nsys.path.insert(0, input())",
    "import sys\nfolders = sys.path\nfolders.insert(0, 'lib')",
]


@pytest.mark.parametrize("insert", INSERTS)
def test_a_folder_that_the_recipe_adds_to_the_module_path_counts(tmp_path: Path, insert: str) -> None:
    recipe = f"{insert}\n{FROM_LIB}{PREPARE}"
    assert edited(tmp_path, "lib/nets.py", {"recipe.py": recipe, "lib/nets.py": NETS}) >= MODELS


@pytest.mark.parametrize("insert", INSERTS[:12])
def test_a_known_folder_counts_by_functions(tmp_path: Path, insert: str) -> None:
    recipe = f"{insert}\n{FROM_LIB}{PREPARE}"
    assert edited(tmp_path, "lib/nets.py", {"recipe.py": recipe, "lib/nets.py": NETS}) == MODELS


@pytest.mark.parametrize("insert", INSERTS[12:])
def test_a_folder_known_only_at_run_time_counts_for_every_stage_and_is_named(tmp_path: Path, insert: str) -> None:
    recipe = f"{insert}\n{FROM_LIB}{PREPARE}"
    assert edited(tmp_path, "lib/nets.py", {"recipe.py": recipe, "lib/nets.py": NETS}) == ALL
    line = 1 + next(number for number, text in enumerate(recipe.splitlines()) if "sys.path" in text)
    old = reach(tmp_path / "recipe.py", tmp_path)["prepare"]
    write(tmp_path, {"lib/nets.py": NETS})
    new = reach(tmp_path / "recipe.py", tmp_path)["prepare"]
    [found] = describe_code(differences({"recipe": old.digests}, {"recipe": new.digests}), None, new.places)
    assert str(found) == (f"build_model changed (lib/nets.py:1), which counts because of sys.path, recipe.py:{line}")


LOADS = [
    "spec = importlib.util.spec_from_file_location('nets', HERE / 'lib' / 'nets.py')\n"
    "    nets = importlib.util.module_from_spec(spec)\n    spec.loader.exec_module(nets)",
    "nets = SourceFileLoader('nets', os.path.join(os.path.dirname(__file__), 'lib/nets.py')).load_module()",
    "nets = Namespace(**runpy.run_path(str(HERE.joinpath('lib', 'nets.py'))))",
    "nets = importlib.import_module('lib.nets')",
    "nets = importlib.import_module(f'lib.{options}')",
    "nets = importlib.import_module('lib.' + options)",
    "nets = importlib.import_module(options['net'])",
    "nets = importlib.import_module('.nets', package='lib')",
    "nets = __import__(options)",
    "spec = importlib.util.find_spec('lib.nets')\n    nets = spec.loader.load_module()",
    "spec = importlib.util.spec_from_file_location('nets', options['file'])\n"
    "    nets = importlib.util.module_from_spec(spec)",
    "nets = {}\n    exec(open('lib/nets.py').read(), nets)",
    "nets = {}\n    exec((HERE / 'lib' / 'nets.py').read_text(), nets)",
]
TOP = (
    "import importlib, importlib.util, os, runpy\nfrom importlib.machinery import SourceFileLoader\n"
    "from argparse import Namespace\nfrom pathlib import Path\n\nHERE = Path(__file__).parent\n\n\n"
)


@pytest.mark.parametrize("load", LOADS)
def test_a_module_that_is_loaded_by_a_function_counts_for_its_stages(tmp_path: Path, load: str) -> None:
    recipe = f"{TOP}{PREPARE}def build_model(options, data):\n    {load}\n    return nets.build_model(options, data)\n"
    assert edited(tmp_path, "lib/nets.py", {"recipe.py": recipe, "lib/nets.py": NETS}) == MODELS


def test_a_name_that_is_put_together_takes_its_package_only(tmp_path: Path) -> None:
    recipe = f"{TOP}{PREPARE}def build_model(options, data):\n    {LOADS[4]}\n    return nets.build_model(options)\n"
    files = {"recipe.py": recipe, "lib/nets.py": NETS, "other/nets.py": NETS}
    assert edited(tmp_path, "other/nets.py", files) == set()


def test_files_of_a_storage_and_of_environments_are_not_the_projects(tmp_path: Path) -> None:
    load = "nets = importlib.import_module(options)"
    recipe = f"{TOP}{PREPARE}def build_model(options, data):\n    {load}\n    return nets\n"
    places = ("store/runs/1/source/nets.py", "store/stages/x.py", "venv/x.py", ".hidden/x.py", "own/x.py")
    write(tmp_path, {"recipe.py": recipe, "own/pyvenv.cfg": "", **dict.fromkeys(places, NETS)})
    assert set(closure(tmp_path / "recipe.py", tmp_path).files) == {"recipe.py"}


def test_a_file_that_is_not_python_counts_by_its_bytes_where_no_import_names_it(tmp_path: Path) -> None:
    load = "nets = importlib.import_module(options)"
    recipe = f"{TOP}{PREPARE}def build_model(options, data):\n    {load}\n    return nets\n"
    assert edited(tmp_path, "draft.py", {"recipe.py": recipe, "draft.py": "def f(: return 4"}) == MODELS


@pytest.mark.parametrize(
    "use",
    [
        "import sys, os\nsys.path.append(os.path.dirname(__file__))\nfrom nets import build_model",
        "from nets import build_model",
        "try:\n    from nets import build_model\nexcept ImportError:\n    from more.nets import build_model",
    ],
)
def test_a_recipe_below_the_root_may_import_from_its_own_folder(tmp_path: Path, use: str) -> None:
    files = {"recipes/recipe.py": f"{use}\n\n\n{PREPARE}", "recipes/nets.py": NETS, "pyproject.toml": ""}
    assert edited(tmp_path, "recipes/nets.py", files, recipe="recipes/recipe.py") >= MODELS


def test_a_folder_outside_of_the_root_counts_and_its_place_does_not(tmp_path: Path) -> None:
    insert = "import sys\nfrom pathlib import Path\nsys.path.append(str(Path(__file__).parents[1] / 'lib'))"
    found = []
    for home in ("one", "two"):
        write(tmp_path / home, {"a/recipe.py": f"{insert}\n{FROM_LIB}{PREPARE}", "lib/nets.py": NETS})
        write(tmp_path / home, {"a/nets.py": "other = 1\n"})
        found.append(reach(tmp_path / home / "a" / "recipe.py", tmp_path / home / "a")["train"].digests)
    assert found[0] == found[1]
    assert {"(lib)/nets.py:build_model"} <= set(found[0])
    write(tmp_path / "two", {"lib/nets.py": NETS.replace("4", "8")})
    assert reach(tmp_path / "two" / "a" / "recipe.py", tmp_path / "two" / "a")["train"].digests != found[1]


def test_two_files_outside_of_the_root_with_one_name_both_count(tmp_path: Path) -> None:
    root = tmp_path / "project"
    for name in ("one", "two"):
        insert = f"import sys\nsys.path.append({str(tmp_path / name / 'lib')!r})"
        write(tmp_path, {f"project/{name}.py": f"{insert}\nfrom {name}nets import build_model\n"})
        write(tmp_path, {f"{name}/lib/{name}nets.py": "from same import build_model\n", f"{name}/lib/same.py": NETS})
    for name in ("one", "two"):
        before = Resolver().code(root / "one.py", root / "two.py", root).reach(stage_code.MODEL).digests
        write(tmp_path, {f"{name}/lib/same.py": NETS.replace("4", f"8, {name!r}")})
        assert Resolver().code(root / "one.py", root / "two.py", root).reach(stage_code.MODEL).digests != before


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is on the module path as `pip install -e` and PYTHONPATH put it there."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "linked")])
    return tmp_path / "linked"


def test_a_package_that_is_installed_in_place_counts_by_functions(tmp_path: Path, linked: Path) -> None:
    files = {"recipe.py": f"from ownlib_of_tests.nets import build_model\n\n\n{PREPARE}"}
    write(linked, {"ownlib_of_tests/__init__.py": "", "ownlib_of_tests/nets.py": NETS})
    write(tmp_path / "project", files)
    before = reach(tmp_path / "project" / "recipe.py", tmp_path / "project")
    write(linked, {"ownlib_of_tests/nets.py": NETS.replace("4", "8")})
    after = reach(tmp_path / "project" / "recipe.py", tmp_path / "project")
    assert {stage for stage in before if before[stage].digests != after[stage].digests} == MODELS


def test_a_large_package_in_place_counts_by_its_bytes(
    tmp_path: Path, linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.stage.closure._MOST_FILES", 2)
    write(linked, {f"ownlib_of_tests/{name}.py": NETS for name in ("__init__", "nets", "more")})
    recipe = tmp_path / "recipe.py"
    write(tmp_path, {"recipe.py": f"from ownlib_of_tests.nets import build_model\n\n\n{PREPARE}"})
    before = reach(recipe, tmp_path)
    assert set(closure(recipe, tmp_path).files) == {"recipe.py", "(linked)/ownlib_of_tests/__init__.py"}
    write(linked, {"ownlib_of_tests/more.py": NETS.replace("4", "8")})
    after = reach(recipe, tmp_path)
    assert {stage for stage in before if before[stage].digests != after[stage].digests} == ALL


def test_installed_packages_and_the_standard_library_are_not_followed() -> None:
    assert [project_files.find_in_place(name) for name in ("torch", "json", "trainer_lib", "not_there_at_all")] == [
        None
    ] * 4
