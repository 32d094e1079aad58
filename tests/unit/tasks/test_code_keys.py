"""Which edit of a project counts for which stage: keys follow functions, wherever the project finds its modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer_lib import recipes
from trainflow.tasks.code.closure import closure, find_in_place
from trainflow.tasks.code.reach import Code, Reach
from trainflow.tasks.keys import stage_code
from trainflow.tasks.keys.resolver import Resolver

BASE = """
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
import numpy as np
from helper import scale, spread

log = logging.getLogger(__name__)
ROOT = Path(__file__).parent
WIDTH = 4
NAMES = {"a": 1, "b": WIDTH}


@dataclass(frozen=True)
class Config:
    width: int = WIDTH


CONFIG = Config(width=3)


def clean(rows):
    return [scale(row) for row in rows]


def prepare(options, out):
    return {"train": clean([1, 2])}


class Net:
    width = CONFIG.width

    def forward(self, x):
        return spread(x)


def build_model(options, data):
    return Net()


def collate(rows):
    return np.array(rows)


def compute_metrics(p):
    return {"error": score(p)}


@lru_cache
def score(p):
    log.info("scoring")
    return len(NAMES)
"""
HELPER = "FACTOR = 2\n\ndef scale(x):\n    return x * FACTOR\n\ndef spread(x):\n    return x\n"
ALL = {"prepare", "train", "evaluate", "predict"}
MODELS = ALL - {"prepare"}
METRICS = "def compute_metrics"  # a place of the recipe that is easily named
SCORE = ("return len(NAMES)", "return 3")
COLLATED = "return np.array(rows)"
PICKLED = "try:\n    import cPickle as pickle\nexcept ImportError:\n    import pickle"
PREPARE = "\n\n\ndef prepare(options, out):\n    return {}\n"
NETS = "def build_model(options, data):\n    return 4\n\n\ndef other():\n    return 5\n"
HAND_ON = "from models import build_model, other\n"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def reach(recipe: Path, root: Path) -> dict[str, Reach]:
    code: Code = Resolver().code(recipe, None, root)
    return {
        "prepare": code.reach(stage_code.PREPARE),
        "train": stage_code.reach_of_train(code, evaluations_choose=False),
        "evaluate": code.reach(stage_code.EVALUATE),
        "predict": stage_code.reach_of_predict(code),
    }


def differ(before: dict[str, Reach], after: dict[str, Reach]) -> set[str]:
    return {stage for stage in before if before[stage].digests != after[stage].digests}


def rerun(folder: Path, files: dict[str, str], old: str, new: str, recipe: str = "recipe.py") -> set[str]:
    """The stages that run again once a text of the project's files is replaced."""
    assert any(old in text for text in files.values())
    write(folder, files)
    before = reach(folder / recipe, folder)
    write(folder, {name: text.replace(old, new) for name, text in files.items()})
    return differ(before, reach(folder / recipe, folder))


def changed(folder: Path, old: str, new: str, base: str = BASE) -> set[str]:
    return rerun(folder, {"recipe.py": base, "helper.py": HELPER}, old, new)


# -- statements of a recipe -------------------------------------------------------------------------------------------
ANYTHING = [
    "NAMES['c'] = 3",
    "NAMES.update(c=3)",
    "Net.width = 5",
    "exec('WIDTH = 9')",
    "np.random.seed(3)",
    "from helper import *",
    "if WIDTH > 3:\n    WIDTH = 5",
    "for name in NAMES:\n    pass",
    "WIDTH += 1",
    "np.array = list",
    "import some_plugin",
    "REGISTERED = make(Net)",
    "@register\ndef more(x):\n    return x",
    "from registry import Registered\n\n\nclass Other(Registered):\n    pass",
    "class Other(Net, key=1):\n    pass",
    "del log",
    "try:\n    import fast\nexcept ImportError:\n    fast = None",
    "class Other:\n    NAMES['c'], more = 1, 2",
    "def wrap(c):\n    def made(*a):\n        NAMES.clear()\n    return made\n\n\n"
    "@wrap\nclass Other: ...\n\n\nOTHER = Other()",
    "ROWS = (each for each in NAMES)",
    "ROWS = zip(NAMES, NAMES)",
    "ROWS: object = [enumerate(NAMES)]",
    "from itertools import count as numbers\nROWS = numbers()",
    "def more(rows=reversed([1])): ...",
    "def more(): return (each for each in [1])\n\n\nROWS = more()",
]
NOTHING = [
    "import torch\nDEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
    "def names():\n    return locals(), dir()",
    "import os\nHOME = Path(os.environ.get('HOME', '.')) / 'data'",
    "def unused(p):\n    return {}",
    "if __name__ == '__main__':\n    print(1)",
]
ADDED = [
    *((statement, ALL) for statement in ANYTHING),  # at import it may change anything
    *((statement, set[str]()) for statement in NOTHING),  # a usual definition that nothing uses
    ("def prediction_columns(p, data):\n    return {}", {"predict"}),
    ("def after_evaluate(m, d, o):\n    return {}", {"evaluate"}),
]


@pytest.mark.parametrize(
    ("old", "new", "stages"),
    [
        ('{"error": score(p)}', '{"error": 1 + score(p)}', {"evaluate"}),
        ("return len(NAMES)", "return 2 * len(NAMES)", {"evaluate"}),
        ('"b": WIDTH', '"b": 7', {"evaluate"}),
        (COLLATED, f"{COLLATED} + 1", MODELS),
        ("return Net()", "return Net() or None", MODELS),
        ("Config(width=3)", "Config(width=5)", ALL),  # what a call makes is made at import
        ("return x * FACTOR", "return x * FACTOR + 1", {"prepare"}),
        ("FACTOR = 2", "FACTOR = 3", {"prepare"}),
        ("    return x\n", "    return -x\n", MODELS),
        ("WIDTH = 4", "WIDTH = 6", ALL),
        ("def collate(rows):", "def collate(rows):\n    'What it does.'  # and why", set()),
        *((METRICS, f"{statement}\n\n\n{METRICS}", stages) for statement, stages in ADDED),
    ],
)
def test_an_edit_counts_for_the_stages_that_reach_it(tmp_path: Path, old: str, new: str, stages: set[str]) -> None:
    assert changed(tmp_path, old, new) == stages


@pytest.mark.parametrize(
    "call",
    [
        "pd.read_pickle(text)",
        "np.load(text, allow_pickle=True)",
        "metadata.entry_points()[text].load()",
        "eval(text)",
        "globals()[text]",
        "pickle.loads(text)",
        "sys.modules[__name__]",
        "score.__globals__[text]",
    ],
)
def test_a_function_that_makes_names_at_run_time_reaches_everything(tmp_path: Path, call: str) -> None:
    imports = "import pickle, sys, pandas as pd\n    from importlib import metadata\n    text = rows"
    assert changed(tmp_path, *SCORE, base=BASE.replace(COLLATED, f"{imports}\n    return {call}")) == MODELS
    assert "recipe.py" in str(reach(tmp_path / "recipe.py", tmp_path)["train"].everything)


@pytest.mark.parametrize(
    ("replaced", "edit", "stages"),
    [
        # A module that reads its own names counts whole.
        *(
            ({METRICS: f"{call}\n\n\n{METRICS}"}, SCORE, ALL)
            for call in ("locals()['WIDTH'] = 5", "vars().update(WIDTH=5)", "MORE = [dir() for _ in '1']")
        ),
        # A name in a text that is read as code counts.
        *(
            ({COLLATED: f"return {call}", "width: int = WIDTH": "width: int = 4"}, ("WIDTH = 4", "WIDTH = 6"), MODELS)
            for call in ("rows.query('n < @WIDTH')", "duckdb.sql('select * from WIDTH')")
        ),
        # A module that is handed on counts whole; one whose name is used does not.
        ({COLLATED: "import helper\n    return getattr(helper, rows)"}, ("FACTOR = 2", "FACTOR = 3"), ALL),
        ({COLLATED: "import helper\n    return helper.spread(rows)"}, ("FACTOR = 2", "FACTOR = 3"), {"prepare"}),
        ({"import logging": PICKLED, COLLATED: "return pickle.loads(rows)"}, SCORE, MODELS),
        # Names that a function holds itself are not the module's.
        (
            {COLLATED: "OWN = rows\n    return [WIDTH for WIDTH in OWN]", "WIDTH = 4\n": "WIDTH = 4\nOWN = 1\n"},
            ("OWN = 1", "OWN = 2"),
            set(),
        ),
    ],
)
def test_an_edit_counts_by_how_another_recipe_uses_names(
    tmp_path: Path, replaced: dict[str, str], edit: tuple[str, str], stages: set[str]
) -> None:
    base = BASE
    for old, new in replaced.items():
        assert old in base
        base = base.replace(old, new)
    assert changed(tmp_path, *edit, base=base) == stages


def test_a_function_that_a_stages_own_file_lacks_is_the_pipelines(tmp_path: Path) -> None:
    write(tmp_path, {"recipe.py": BASE, "helper.py": HELPER, "own.py": "def compute_metrics(p):\n    return {}\n"})
    code = Resolver().code(tmp_path / "own.py", tmp_path / "recipe.py", tmp_path)
    labels = set(code.reach(stage_code.EVALUATE).digests)
    assert {"own.py:compute_metrics", "recipe.py:build_model", "recipe.py:collate"} <= labels
    assert "recipe.py:compute_metrics" not in labels


# -- metrics that may change a training -------------------------------------------------------------------------------
STOPS = "def callbacks(options):\n    return [Stop()]\n"
LOOKS = [
    f"{STOPS}\n\nclass Stop:\n    def on_evaluate(self, *a, metrics): ...",
    "from library import StopCallback\n\n\ndef callbacks(options):\n    return [StopCallback()]",
    f"from library import StopCallback as Stop\n\n\n{STOPS}",
    "import torch\n\n\nclass Trainer:\n    def create_scheduler(self, n, o=None):\n"
    "        return torch.optim.lr_scheduler.ReduceLROnPlateau(o)",
    "class Trainer:\n    def training_step(self, model, inputs):\n        self.evaluate()",
    "from library import Stopper\n\n\ndef callbacks(options):\n    return [Stopper()]",
    "import library.stops as stops\n\n\ndef callbacks(options):\n    return [stops.early(3)]",
    "def callbacks(options):\n    from library import Stopper\n\n    return [Stopper()]",
    f"from library import Base\n\n\nclass Stop(Base): ...\n\n\n{STOPS}",
    "from library import Trainer",
    "from library import Base\n\n\nclass Trainer(Base): ...",
    f"class Stop:\n    def __getattr__(self, event):\n        return self.stop\n\n\n{STOPS}",
]
LOOKS_AWAY = [
    "import time\nfrom trainer_lib import TrainerCallback\n\n\nclass Stop(TrainerCallback):\n"
    f"    def on_step_end(self, args, state, control, **kwargs):\n        self.last = time.time()\n\n\n{STOPS}",
    "from transformers import ProgressCallback\n\n\ndef callbacks(options):\n    return [ProgressCallback()]",
    "import torch\nfrom trainer_lib import Trainer as Base\n\n\nclass Trainer(Base):\n"
    "    def compute_loss(self, model, inputs):\n        return torch.nn.functional.mse_loss(*model(inputs))",
]


@pytest.mark.parametrize(("more", "counts"), [*((more, True) for more in LOOKS), *((m, False) for m in LOOKS_AWAY)])
def test_metrics_count_for_train_where_its_code_looks_at_them(tmp_path: Path, more: str, counts: bool) -> None:
    stages = changed(tmp_path, *SCORE, base=f"{BASE}\n\n{more}\n")
    assert "train" in stages if counts else stages == {"evaluate"}


@pytest.mark.parametrize(
    "body",
    ["np.random.rand()", "NAMES.update(p=1)", "CONFIG.more = 1", "torch.set_num_threads(1)", "global WIDTH; WIDTH = 1"],
)
def test_metrics_that_may_disturb_training_count_for_train(tmp_path: Path, body: str) -> None:
    base = BASE.replace("return Net()", "return Net(NAMES)").replace('    log.info("scoring")', f"    {body}")
    assert "train" in changed(tmp_path, body, f"{body}; print(1)", base=base)


def test_evaluations_change_no_weights_of_most_named_recipes() -> None:
    seen = {"causal_language_modeling", "embeddings", "supervised_fine_tuning"}  # by names of torch's logarithm
    seen |= {"feedback_optimization", "preference_optimization"}
    folder, resolver = Path(recipes.__file__).parent, Resolver()
    names = [path.stem for path in folder.glob("[a-z]*.py")]
    assert {
        name for name in names if stage_code.evaluations_matter_to(resolver.code(folder / f"{name}.py", None, folder))
    } == seen


def test_metrics_count_for_train_where_they_choose_the_weights_and_for_its_curve(tmp_path: Path) -> None:
    write(tmp_path, {"recipe.py": BASE, "helper.py": HELPER})
    code: Code = Resolver().code(tmp_path / "recipe.py", None, tmp_path)
    assert "recipe.py:score" in stage_code.reach_of_train(code, evaluations_choose=True).digests
    assert "recipe.py:score" not in stage_code.reach_of_train(code, evaluations_choose=False).digests
    digests = set()
    for helper in (HELPER, HELPER.replace("    return x\n", "    return -x\n")):
        write(tmp_path, {"recipe.py": "from helper import spread as compute_metrics\n", "helper.py": helper})
        digests.add(stage_code.metrics_digest(Resolver().code(tmp_path / "recipe.py", None, tmp_path)))
    assert len(digests) == 2


# -- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        "from models import build_model",
        "from nets import build_model",
        "from models import *",
        "from nets import *",
        "try:\n    from fast import build_model\nexcept ImportError:\n    from models import build_model",
        "if True:\n    from nets import build_model",
        "import models\nbuild_model = models.build_model",
        "def build_model(o, d):\n    import nets\n    return getattr(nets, o['net'])()",
        "import nets as shapes\n\n\ndef build_model(o, d):\n    return getattr(shapes, o['net'])()",
        "try:\n    import nets\nexcept ImportError:\n    nets = None\n\n\n"
        "def build_model(o, d):\n    return nets.build_model(o, d)",
        "class Net:\n    from models import build_model\n\n\ndef build_model(o, d):\n    return Net().build_model(o)",
        "def build_model(o, d):\n    class Net:\n        from models import build_model as f\n    return Net.f(o, d)",
    ],
)
def test_an_imported_function_counts_for_the_stages_that_call_it(tmp_path: Path, recipe: str) -> None:
    files = {"models.py": NETS, "nets.py": HAND_ON, "recipe.py": f"{recipe}{PREPARE}"}
    stages = rerun(tmp_path, files, "return 4", "return 8")
    # A conditional import of a module, and an import in a class, count for every stage.
    assert stages == MODELS if recipe.startswith(("from models import b", "def ", "if ")) else stages >= MODELS


def test_an_imported_function_leaves_others_of_its_file_out(tmp_path: Path) -> None:
    conditional = "try:\n    from models import build_model, other\nexcept ImportError:\n    pass\n"
    for recipe in ("from nets import build_model, other\n", conditional):
        files = {"models.py": NETS, "nets.py": HAND_ON, "recipe.py": recipe}
        assert rerun(tmp_path, files, "return 5", "return 6") == set()


@pytest.mark.parametrize(
    ("file", "use"),
    [
        ("deep/inner/nets.py", "from deep import inner\nimport deep.inner.nets\nbuild_model = inner.nets.build_model"),
        ("src/own/nets.py", "from own import build_model"),
        ("src/own/nets.py", "import own.nets\nbuild_model = own.nets.build_model"),
    ],
)
def test_a_package_without_an_init_or_below_src_counts(tmp_path: Path, file: str, use: str) -> None:
    files = {"recipe.py": f"{use}{PREPARE}", file: NETS, "src/own/__init__.py": "from .nets import build_model\n"}
    assert rerun(tmp_path, files, "return 4", "return 8") == MODELS


PLACES = [
    "import sys\nsys.path.insert(0, 'lib')",
    "import sys\nSHORT = '~no-such-user'\nsys.path.insert(0, 'lib')",
    "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent / 'lib'))",
    "import sys\nfrom pathlib import Path\nHERE = Path(__file__).resolve().parents[0]\nsys.path += [str(HERE / 'lib')]",
    "import sys as system\nfrom pathlib import Path\nsystem.path.extend([f'{Path(__file__).parent}/lib', '/nowhere'])",
    "from sys import path\npath[:0] = ['lib']",
    "import sys\nsys.path = ['lib', *sys.path]",
    "import site\nsite.addsitedir('lib')",
    "import os, sys\nsys.path.insert(0, os.environ.get('LIBRARY_OF_TESTS', 'lib'))",
    "import sys\ndef add(folder):\n    sys.path.insert(0, folder)\nadd('lib')",
    "import sys\nsys.path.insert(0, input())",
    "import sys\nfolders = sys.path\nfolders.insert(0, 'lib')",
]


@pytest.mark.parametrize("insert", PLACES)
def test_a_folder_that_the_recipe_adds_to_the_module_path_counts_by_functions(tmp_path: Path, insert: str) -> None:
    files = {"recipe.py": f"{insert}\nfrom nets import build_model{PREPARE}", "lib/nets.py": NETS}
    assert rerun(tmp_path, files, "return 4", "return 8") == MODELS


LOADS = [
    "spec = importlib.util.spec_from_file_location('nets', HERE / 'lib' / 'nets.py')\n"
    "    nets = importlib.util.module_from_spec(spec)\n    spec.loader.exec_module(nets)",
    "nets = SourceFileLoader('nets', os.path.join(os.path.dirname(__file__), 'lib/nets.py')).load_module()",
    "nets = Namespace(**runpy.run_path(str(HERE.joinpath('lib', 'nets.py'))))",
    "nets = importlib.import_module('lib.nets')",
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
    "from argparse import Namespace\nfrom pathlib import Path\n\nHERE = Path(__file__).parent\n"
)
ANY_MODULE = "nets = importlib.import_module(options)"


def loading(load: str) -> str:
    """A recipe that loads a module by a function."""
    return f"{TOP}{PREPARE}def build_model(options, data):\n    {load}\n    return nets.build_model(options, data)\n"


@pytest.mark.parametrize("load", LOADS)
def test_a_module_that_is_loaded_by_a_function_counts_for_its_stages(tmp_path: Path, load: str) -> None:
    assert rerun(tmp_path, {"recipe.py": loading(load), "lib/nets.py": NETS}, "return 4", "return 8") == MODELS


def test_a_file_that_is_not_python_counts_by_its_bytes_where_no_import_names_it(tmp_path: Path) -> None:
    files = {"recipe.py": loading(ANY_MODULE), "draft.py": "def f(: return 4"}
    assert rerun(tmp_path, files, "return 4", "return 8") == MODELS


def test_files_of_a_storage_and_of_environments_are_not_the_projects(tmp_path: Path) -> None:
    places = ("store/runs/1/source/nets.py", "store/stages/x.py", "venv/x.py", ".hidden/x.py", "own/x.py")
    write(tmp_path, {"recipe.py": loading(ANY_MODULE), "own/pyvenv.cfg": "", **dict.fromkeys(places, NETS)})
    assert set(closure(tmp_path / "recipe.py", tmp_path).files) == {"recipe.py"}


@pytest.mark.parametrize(
    "use",
    [
        "import sys, os\nsys.path.append(os.path.dirname(__file__))\nfrom nets import build_model",
        "from nets import build_model",
        "try:\n    from nets import build_model\nexcept ImportError:\n    from more.nets import build_model",
    ],
)
def test_a_recipe_below_the_root_may_import_from_its_own_folder(tmp_path: Path, use: str) -> None:
    files = {"recipes/recipe.py": f"{use}{PREPARE}", "recipes/nets.py": NETS, "pyproject.toml": ""}
    assert rerun(tmp_path, files, "return 4", "return 8", recipe="recipes/recipe.py") >= MODELS


def test_a_folder_outside_of_the_root_counts_and_its_place_does_not(tmp_path: Path) -> None:
    insert = "import sys\nfrom pathlib import Path\nsys.path.append(str(Path(__file__).parents[1] / 'lib'))"
    recipe = f"{insert}\nfrom nets import build_model{PREPARE}"
    found = []
    for home in (tmp_path / "one", tmp_path / "two"):
        write(home, {"a/recipe.py": recipe, "a/nets.py": "other = 1\n", "lib/nets.py": NETS})
        found.append(reach(home / "a" / "recipe.py", home / "a")["train"].digests)
    assert found[0] == found[1]
    assert {"(lib)/nets.py:build_model"} <= set(found[0])
    write(home, {"lib/nets.py": NETS.replace("4", "8")})
    assert reach(home / "a" / "recipe.py", home / "a")["train"].digests != found[1]


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


@pytest.mark.parametrize("is_large", [False, True])
def test_a_package_installed_in_place_counts_by_functions_and_a_large_one_by_its_bytes(
    tmp_path: Path, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked, root = tmp_path / "linked", tmp_path / "project"
    monkeypatch.setattr(sys, "path", [*sys.path, str(linked)])  # as `pip install -e` and PYTHONPATH do
    write(linked, {f"ownlib_of_tests/{name}.py": NETS for name in ("__init__", "nets", "more")})
    write(root, {"recipe.py": f"from ownlib_of_tests.nets import build_model{PREPARE}"})
    if is_large:
        monkeypatch.setattr("trainflow.tasks.code.closure._MOST_FILES", 2)
    before = reach(root / "recipe.py", root)
    if is_large:
        counted = {"recipe.py", "(linked)/ownlib_of_tests/__init__.py"}
        assert set(closure(root / "recipe.py", root).files) == counted
    write(linked, {f"ownlib_of_tests/{'more' if is_large else 'nets'}.py": NETS.replace("4", "8")})
    assert differ(before, reach(root / "recipe.py", root)) == (ALL if is_large else MODELS)


def test_installed_packages_and_the_standard_library_are_not_followed() -> None:
    assert [find_in_place(name) for name in ("torch", "json", "trainer_lib", "not_there_at_all")] == [None] * 4
