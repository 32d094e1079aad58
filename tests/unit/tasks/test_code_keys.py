"""Which edit of a recipe counts for which stage: keys follow functions, not files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.stage import stage_code
from tasks.stage.reach import Code, Reach
from tasks.stage.resolver import Resolver
from tests.support.recipe_edits import Counts, check

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


def reach(folder: Path, recipe: str = BASE, helper: str = HELPER) -> dict[str, Reach]:
    (folder / "recipe.py").write_text(recipe)
    (folder / "helper.py").write_text(helper)
    code = Resolver().code(folder / "recipe.py", None, folder)
    return {
        "prepare": code.reach(stage_code.PREPARE),
        "train": stage_code.reach_of_train(code, evaluations_choose=False),
        "evaluate": code.reach(stage_code.EVALUATE),
        "predict": stage_code.reach_of_predict(code),
    }


def changed(folder: Path, old: str, new: str, *, base: str = BASE, helper: str = HELPER) -> set[str]:
    """The stages that an edit runs again."""
    assert old in base or old in helper
    before = reach(folder, base, helper)
    after = reach(folder, base.replace(old, new), helper.replace(old, new))
    return {stage for stage in before if before[stage].digests != after[stage].digests}


ALL = {"prepare", "train", "evaluate", "predict"}
MODELS = ALL - {"prepare"}


@pytest.mark.parametrize(
    ("old", "new", "stages"),
    [
        ('{"error": score(p)}', '{"error": 1 + score(p)}', {"evaluate"}),
        ("return len(NAMES)", "return 2 * len(NAMES)", {"evaluate"}),
        ('"b": WIDTH', '"b": 7', {"evaluate"}),
        ("return np.array(rows)", "return np.array(rows) + 1", MODELS),
        ("return Net()", "return Net() or None", MODELS),
        ("Config(width=3)", "Config(width=5)", MODELS),
        ("return x * FACTOR", "return x * FACTOR + 1", {"prepare"}),
        ("FACTOR = 2", "FACTOR = 3", {"prepare"}),
        ("    return x\n", "    return -x\n", MODELS),
        ("WIDTH = 4", "WIDTH = 6", MODELS),
        ("import numpy as np", "import numpy as np\nimport seaborn", set()),
        (
            "def compute_metrics",
            "def prediction_columns(p, data):\n    return {}\n\n\ndef compute_metrics",
            {"predict"},
        ),
        ("def compute_metrics", "def after_evaluate(m, d, o):\n    return {}\n\n\ndef compute_metrics", {"evaluate"}),
        ("def compute_metrics", "def unused(p):\n    return {}\n\n\ndef compute_metrics", set()),
        ("def collate(rows):", "def collate(rows):\n    'What it does.'  # and why", set()),
        ("def compute_metrics", "if __name__ == '__main__':\n    print(1)\n\n\ndef compute_metrics", set()),
    ],
)
def test_an_edit_counts_for_the_stages_that_reach_it(tmp_path: Path, old: str, new: str, stages: set[str]) -> None:
    assert changed(tmp_path, old, new) == stages


@pytest.mark.parametrize(
    "statement",
    [
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
    ],
)
def test_what_may_change_anything_at_import_counts_for_every_stage(tmp_path: Path, statement: str) -> None:
    assert changed(tmp_path, "def compute_metrics", f"{statement}\n\n\ndef compute_metrics") == ALL


@pytest.mark.parametrize(
    "statement",
    [
        "import torch\nDEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "import torch\nLOSS = torch.nn.CrossEntropyLoss()",
        "RNG = np.random.default_rng(3)",
        "TABLE = {name: index * 2 for index, name in enumerate(sorted(NAMES))}",
        "TOTAL = sum(len(name) for name in NAMES)",
        "PAIRS = dict(zip(NAMES, enumerate(NAMES)))",
        "KEYS, VALUES = zip(*[(1, 2), (3, 4)])",
        "TITLE = ', '.join(name for name in NAMES)",
        "def names():\n    return locals(), dir()",
        "import os\nHOME = Path(os.environ.get('HOME', '.')) / 'data'",
        "def timed(f):\n    def inner(x):\n        return f(x)\n    return inner\n\n\n@timed\ndef slow(x): ...",
    ],
)
def test_a_usual_definition_that_nothing_uses_counts_for_no_stage(tmp_path: Path, statement: str) -> None:
    assert changed(tmp_path, "def compute_metrics", f"{statement}\n\n\ndef compute_metrics") == set()


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
    base = BASE.replace(
        "return np.array(rows)",
        f"import pickle, sys, pandas as pd\n    from importlib import metadata\n    text = rows\n    return {call}",
    )
    assert changed(tmp_path, "return len(NAMES)", "return 3", base=base) == MODELS
    assert "recipe.py" in str(reach(tmp_path, base)["train"].everything)


@pytest.mark.parametrize("call", ["locals()['WIDTH'] = 5", "vars().update(WIDTH=5)", "MORE = [dir() for _ in '1']"])
def test_a_module_that_reads_its_own_names_counts_whole(tmp_path: Path, call: str) -> None:
    base = BASE.replace("def compute_metrics", f"{call}\n\n\ndef compute_metrics")
    assert changed(tmp_path, "return len(NAMES)", "return 3", base=base) == ALL


@pytest.mark.parametrize("call", ["rows.query('n < @WIDTH')", "duckdb.sql('select * from WIDTH')"])
def test_a_name_in_a_text_that_is_read_as_code_counts(tmp_path: Path, call: str) -> None:
    base = BASE.replace("return np.array(rows)", f"return {call}").replace("width: int = WIDTH", "width: int = 4")
    assert changed(tmp_path, "WIDTH = 4", "WIDTH = 6", base=base) == MODELS


def test_a_module_in_folders_without_an_init_counts(tmp_path: Path) -> None:
    (tmp_path / "deep" / "inner").mkdir(parents=True)
    (tmp_path / "deep" / "inner" / "nets.py").write_text("def spread(x):\n    return x\n")
    use = "from deep import inner\n    import deep.inner.nets\n    return inner.nets.spread(rows)"
    base = BASE.replace("return np.array(rows)", use)
    before = reach(tmp_path, base)
    (tmp_path / "deep" / "inner" / "nets.py").write_text("def spread(x):\n    return -x\n")
    after = reach(tmp_path, base)
    assert {stage for stage in before if before[stage].digests != after[stage].digests} == MODELS


@pytest.mark.parametrize("use", ["from own import spread", "import own.nets\nspread = own.nets.spread"])
def test_a_package_below_src_counts(tmp_path: Path, use: str) -> None:
    package = tmp_path / "src" / "own"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .nets import spread\n")
    (package / "nets.py").write_text("def spread(x):\n    return x\n")
    base = BASE.replace("from helper import scale, spread", f"from helper import scale\n{use}")
    before = reach(tmp_path, base)
    (package / "nets.py").write_text("def spread(x):\n    return -x\n")
    after = reach(tmp_path, base)
    assert {stage for stage in before if before[stage].digests != after[stage].digests} == MODELS


def test_a_module_that_is_handed_on_counts_whole(tmp_path: Path) -> None:
    base = BASE.replace("return np.array(rows)", "import helper\n    return getattr(helper, rows)")
    assert changed(tmp_path, "FACTOR = 2", "FACTOR = 3", base=base) == ALL
    base = BASE.replace("return np.array(rows)", "import helper\n    return helper.spread(rows)")
    assert changed(tmp_path, "FACTOR = 2", "FACTOR = 3", base=base) == {"prepare"}


FILES = {
    "models.py": "def build_model(options, data):\n    return 4\n\n\ndef other():\n    return 5\n",
    "nets.py": "from models import build_model, other\n",
}


def changed_files(folder: Path, name: str, old: str, new: str, files: dict[str, str]) -> set[str]:
    """The stages that an edit of one of several files runs again."""
    for file, text in files.items():
        (folder / file).write_text(text)
    before = reach(folder, files["recipe.py"])
    assert old in files[name]
    edited = files[name].replace(old, new)
    if name == "recipe.py":
        after = reach(folder, edited)
    else:
        (folder / name).write_text(edited)
        after = reach(folder, files["recipe.py"])
    return {stage for stage in before if before[stage].digests != after[stage].digests}


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
    files = {**FILES, "recipe.py": f"{recipe}\n\n\ndef prepare(options, out):\n    return {{}}\n"}
    stages = changed_files(tmp_path, "models.py", "return 4", "return 8", files)
    # A conditional import of a module, and an import in a class, count for every stage.
    assert stages == MODELS if recipe.startswith(("from models import b", "def ", "if ")) else stages >= MODELS


def test_an_imported_function_leaves_others_of_its_file_out(tmp_path: Path) -> None:
    conditional = "try:\n    from models import build_model, other\nexcept ImportError:\n    pass\n"
    for recipe in ("from nets import build_model, other\n", conditional):
        assert changed_files(tmp_path, "models.py", "return 5", "return 6", {**FILES, "recipe.py": recipe}) == set()


def test_imported_metrics_count_for_the_curve_of_training(tmp_path: Path) -> None:
    reach(tmp_path, "from helper import spread as compute_metrics\n")
    before = stage_code.metrics_digest(Resolver().code(tmp_path / "recipe.py", None, tmp_path))
    (tmp_path / "helper.py").write_text(HELPER.replace("    return x\n", "    return -x\n"))
    assert before != stage_code.metrics_digest(Resolver().code(tmp_path / "recipe.py", None, tmp_path))


def test_unpickling_below_a_conditional_import_reaches_everything(tmp_path: Path) -> None:
    base = BASE.replace("import logging", "try:\n    import cPickle as pickle\nexcept ImportError:\n    import pickle")
    base = base.replace("return np.array(rows)", "return pickle.loads(rows)")
    assert changed(tmp_path, "return len(NAMES)", "return 3", base=base) == MODELS


def test_names_that_a_function_holds_itself_are_not_the_modules(tmp_path: Path) -> None:
    base = BASE.replace("return np.array(rows)", "FACTOR = rows\n    return [WIDTH for WIDTH in FACTOR]")
    base = base.replace("WIDTH = 4\n", "WIDTH = 4\nFACTOR = 1\n")
    assert changed(tmp_path, "FACTOR = 1", "FACTOR = 2", base=base, helper=HELPER) == set()


@pytest.mark.parametrize(
    "more",
    [
        "def callbacks(options):\n    return [Stop()]\n\n\nclass Stop:\n    def on_evaluate(self, *a, metrics): ...",
        "from library import StopCallback\n\n\ndef callbacks(options):\n    return [StopCallback()]",
        "from library import StopCallback as Stop\n\n\ndef callbacks(options):\n    return [Stop()]",
        "import torch\n\n\nclass Trainer:\n    def create_scheduler(self, n, o=None):\n"
        "        return torch.optim.lr_scheduler.ReduceLROnPlateau(o)",
        "class Trainer:\n    def training_step(self, model, inputs):\n        self.evaluate()",
        "from library import Stopper\n\n\ndef callbacks(options):\n    return [Stopper()]",
        "import library.stops as stops\n\n\ndef callbacks(options):\n    return [stops.early(3)]",
        "def callbacks(options):\n    from library import Stopper\n\n    return [Stopper()]",
        "from library import Base\n\n\nclass Stop(Base): ...\n\n\ndef callbacks(options):\n    return [Stop()]",
        "from library import Trainer",
        "from library import Base\n\n\nclass Trainer(Base): ...",
        "class Stop:\n    def __getattr__(self, event):\n        return self.stop\n\n\n"
        "def callbacks(options):\n    return [Stop()]",
    ],
)
def test_metrics_count_for_train_where_its_code_looks_at_them(tmp_path: Path, more: str) -> None:
    base = f"{BASE}\n\n{more}\n"
    assert "train" in changed(tmp_path, "return len(NAMES)", "return 3", base=base)


@pytest.mark.parametrize(
    "more",
    [
        "import time\nfrom trainer_lib import TrainerCallback\n\n\nclass Timer(TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n        self.last = time.time()\n\n\n"
        "def callbacks(options):\n    return [Timer()]",
        "from transformers import ProgressCallback\n\n\ndef callbacks(options):\n    return [ProgressCallback()]",
        "import torch\nfrom trainer_lib import Trainer as Base\n\n\nclass Trainer(Base):\n"
        "    def compute_loss(self, model, inputs):\n        return torch.nn.functional.mse_loss(*model(inputs))",
    ],
)
def test_metrics_do_not_count_for_train_where_its_code_cannot_look_at_them(tmp_path: Path, more: str) -> None:
    assert changed(tmp_path, "return len(NAMES)", "return 3", base=f"{BASE}\n\n{more}\n") == {"evaluate"}


@pytest.mark.parametrize(
    "body",
    ["np.random.rand()", "NAMES.update(p=1)", "CONFIG.more = 1", "torch.set_num_threads(1)", "global WIDTH; WIDTH = 1"],
)
def test_metrics_that_may_disturb_training_count_for_train(tmp_path: Path, body: str) -> None:
    base = BASE.replace("return Net()", "return Net(NAMES)").replace('    log.info("scoring")', f"    {body}")
    assert "train" in changed(tmp_path, body, f"{body}; print(1)", base=base)


def test_metrics_count_for_train_where_they_choose_the_weights(tmp_path: Path) -> None:
    reach(tmp_path)
    code: Code = Resolver().code(tmp_path / "recipe.py", None, tmp_path)
    assert "recipe.py:score" in stage_code.reach_of_train(code, evaluations_choose=True).digests
    assert "recipe.py:score" not in stage_code.reach_of_train(code, evaluations_choose=False).digests


def test_a_function_that_a_stages_own_file_lacks_is_the_pipelines(tmp_path: Path) -> None:
    reach(tmp_path)
    own = tmp_path / "own.py"
    own.write_text("def compute_metrics(p):\n    return {}\n")
    code = Resolver().code(own, tmp_path / "recipe.py", tmp_path)
    labels = set(code.reach(stage_code.EVALUATE).digests)
    assert {"own.py:compute_metrics", "recipe.py:build_model", "recipe.py:collate"} <= labels
    assert "recipe.py:compute_metrics" not in labels


# tests/flows/test_random_edits.py has many more of them.
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(1 << 20, 1 << 40))
def test_no_edit_that_changes_an_output_keeps_its_key(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(seed, Path(folder), Counts())
