"""Random recipes of three files and random edits of them: what each stage gives, what its key covers, what a plan says.

The recipes are executed for real: each stage loads its files again, calls its functions, and its output and every
function that ran are recorded. By hand: ``python -m tests.support.recipe_edits 20000``.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from trainer_lib.hub.base import Content
from trainer_lib.hub.folder import open_hub
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.spec import load_spec
from trainflow.tasks.code.reach import Code, Reach
from trainflow.tasks.keys import stage_code
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.stage import manifest as _manifests
from trainflow.tasks.stage.facts import EvaluateFacts, PredictFacts, PrepareFacts, PublishFacts, StageFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.rerun import publication_target
from trainflow.tasks.stage.runner import StageAttempt, StageOutput, run_stage

STAGES = ("prepare-data", "train", "evaluate", "predict")
ENTRIES = ("prepare", "build_model", "collate", "compute_metrics", "prediction_columns")


@dataclass
class Part:
    """One statement of a file: its source with ``{n}`` for a number that edits change."""

    text: str
    number: int
    name: str = ""

    def source(self) -> str:
        return self.text.replace("{n}", str(self.number))


@dataclass
class Project:
    """Three files as lists of statements; the recipe reaches `base` only through the helper."""

    base: list[Part] = field(default_factory=list)
    helper: list[Part] = field(default_factory=list)
    recipe: list[Part] = field(default_factory=list)
    place: str = ""  # the folder of `base`, which the recipe adds to the module path; empty for the recipe's own

    def sources(self) -> dict[str, str]:
        files = {f"{self.place}base_of_edits": self.base, "helper_of_edits": self.helper, "recipe": self.recipe}
        return {name: "\n".join(part.source() for part in file) + "\n" for name, file in files.items()}

    def copy(self) -> Project:
        def copied(file: list[Part]) -> list[Part]:
            return [Part(part.text, part.number, part.name) for part in file]

        return Project(copied(self.base), copied(self.helper), copied(self.recipe), self.place)


IMPORTS = (
    "import helper_of_edits",
    "import helper_of_edits as h",
    "from helper_of_edits import a0, a1, A_K0, A_T0",
    "from helper_of_edits import *",
    "try:\n    from helper_of_edits import a0\nexcept ImportError:\n    a0 = None",
    "try:\n    from missing_of_edits import a0\nexcept ImportError:\n    from helper_of_edits import a0",
    "try:\n    from helper_of_edits import c0 as a0\nexcept ImportError:\n    from helper_of_edits import a0",
)
AGAIN = (
    "from base_of_edits import c0, c1",
    "from base_of_edits import *",
    "if True:\n    from base_of_edits import c0, c1\nelse:\n    c0 = c1 = None",
    "import importlib\nA_base = importlib.import_module('base_of_edits')\nc0, c1 = A_base.c0, A_base.c1",
    "import importlib\nA_base = importlib.import_module('base_of_%s' % 'edits')\nc0, c1 = A_base.c0, A_base.c1",
    "def c0(x):\n    import importlib\n    return importlib.import_module('base_of_' + 'edits').c0(x)\n\nc1 = c0",
)
"""How the helper hands on what the third file defines."""
PLACES = (
    "import sys\nsys.path.insert(0, 'lib')",
    "import os, sys\nsys.path.append(os.path.join(os.path.dirname(__file__), 'lib'))",
    "import sys\nfrom pathlib import Path\nB_HERE = Path(__file__).parent\nsys.path += [str(B_HERE / 'lib')]",
    "import sys\nfor B_folder in ('other', 'lib'):\n    sys.path.append(B_folder)",
    "import sys\nsys.path.append(max(['lib']))",
    "import sys\nsys.path[:0] = [each for each in ['lib']]",
)
"""How the recipe adds the folder of the third file to the module path."""
ADDED = "adds a folder"
ENTRY_IMPORTS = (
    "from helper_of_edits import WHAT as ENTRY",
    "try:\n    from missing_of_edits import WHAT as ENTRY\n"
    "except ImportError:\n    from helper_of_edits import WHAT as ENTRY",
    "import helper_of_edits as ENTRY_home\nENTRY = ENTRY_home.WHAT",
    "class ENTRY_class:\n    from helper_of_edits import WHAT\nENTRY = ENTRY_class.WHAT",
    "def ENTRY(x):\n    class Inner:\n        from helper_of_edits import WHAT\n    return [Inner.WHAT(x), {n}]",
    "import helper_of_edits as ENTRY_home\ndef ENTRY(x):\n    return [getattr(ENTRY_home, 'WH' 'AT')(x), {n}]",
)


def make_project(draw: random.Random) -> Project:
    """Make a random project; names of the helper begin with a, those of the recipe with b, of the third file with c."""
    base = _definitions(draw, "c", [])
    helper = [Part(draw.choice(AGAIN), 0), *_definitions(draw, "a", ["c0", "c1"])]
    public = ["a0", "a1", "A_K0", "A_T0"]
    imported = draw.choice(IMPORTS)
    known = {"import helper_of_edits": "helper_of_edits.", "import helper_of_edits as h": "h."}.get(imported)
    names = [f"{known}{name}" for name in public] if known else ["a0"] if imported.startswith("try") else public
    recipe = [Part(imported, 0), *_definitions(draw, "b", names)]
    callees = [*names, *(part.name for part in recipe if part.name)]
    recipe += [Part(_entry(draw, entry, callees), draw.randrange(9), entry) for entry in ENTRIES]
    project = Project(base, helper, recipe)
    if draw.random() < 0.5:
        project.place = "lib/"
        recipe.insert(1, Part(draw.choice(PLACES), 0, ADDED))
    return project


def _entry(draw: random.Random, entry: str, callees: list[str]) -> str:
    if draw.random() < 0.3:
        wanted = draw.choice(("a0", "a1", "c0", "c1"))
        text = draw.choice(ENTRY_IMPORTS).replace("'WH' 'AT'", f"'{wanted[0]}' '{wanted[1]}'")
        return text.replace("ENTRY", entry).replace("WHAT", wanted)
    return f"def {entry}(x):\n    return [{{n}}, {_expression(draw, callees)}]"


def _definitions(draw: random.Random, letter: str, outside: list[str]) -> list[Part]:
    upper = letter.upper()
    parts = [Part(f"{upper}_K0 = {{n}}", draw.randrange(9), f"{upper}_K0"),
             Part(f"{upper}_T0 = [{{n}}, 2]", draw.randrange(9), f"{upper}_T0"),
             Part(f"{upper}_LOG = []", 0, f"{upper}_LOG")]  # fmt: skip
    names = [*outside, f"{upper}_K0", f"{upper}_T0"]
    for index in range(draw.randrange(2, 7)):
        name, inner = f"{letter}{index}", _expression(draw, names)
        text = draw.choice(SHAPES).replace("NAME", name).replace("INNER", inner).replace("UP", upper)
        parts.append(Part(text, draw.randrange(9), name))
        names.append(name)
        if draw.random() < 0.25:
            effect = draw.choice(EFFECTS).replace("UP", upper).replace("INNER", inner).replace("NAME", name)
            parts.append(Part(effect, draw.randrange(9)))
    if not any(part.name == f"{letter}1" for part in parts):
        parts.append(Part(f"def {letter}1(x):\n    return {{n}}", 1, f"{letter}1"))
    return parts


SHAPES = (
    "def NAME(x):\n    return [{n}, INNER]",
    "def NAME(x, y={n}):\n    return [y, INNER]",
    "def NAME(x, y=UP_K0):\n    return [y, {n}]",
    "NAME = lambda x: [{n}, INNER]",
    "def NAME(x):\n    def inner(UP_K0):\n        return [UP_K0, {n}]\n    return inner(x) + [INNER]",
    "def NAME(x):\n    return [[UP_K0 for UP_K0 in range({n})], INNER, UP_K0]",
    "def NAME(x):\n    UP_LOG.append({n})\n    return [len(UP_LOG), INNER]",
    "def NAME(x):\n    return [len(UP_LOG), {n}]",
    "def NAME(x):\n    global UP_K0\n    UP_K0 = {n}\n    return INNER",
    "def NAME(x):\n    UP_T0[0] = {n}\n    return INNER",
    "class NAME(list):\n    size = {n}\n    def __init__(self, x):\n        self.append(self.more(x))\n"
    "    def more(self, x):\n        return [self.size, INNER]",
    "def NAME_wrap(f):\n    def inner(x):\n        return [{n}, f(x)]\n    return inner\n"
    "@NAME_wrap\ndef NAME(x):\n    return INNER",
    "def NAME(x):\n    import helper_of_edits as own\n    return [own.A_K0, {n}]",
    "def NAME(x):\n    from helper_of_edits import a1 as own\n    return [own(x) if x > 8 else 1, {n}]",
    "def NAME(x):\n    return [globals()['UP_K0'], {n}]",
    "def NAME(x):\n    return [eval('UP_K0 + {n}'), INNER]",
    "def NAME(x):\n    match [x, {n}]:\n        case [UP_K0, y]:\n            return [UP_K0, y, INNER]",
    "def NAME(x):\n    try:\n        raise ValueError({n})\n"
    "    except ValueError as UP_T0:\n        return [str(UP_T0), INNER]",
    "def NAME(x):\n    import helper_of_edits as own\n    return [getattr(own, 'A_' + 'K0'), {n}]",
    "NAME_value = UP_K0 * 2 + {n}\ndef NAME(x):\n    return [NAME_value, INNER]",
)
EFFECTS = (
    "UP_T0.append({n})",
    "UP_K0 = UP_K0 + {n}",
    "UP_K0 += {n}",
    "UP_LOG.append({n})",
    "if UP_K0 > {n}:\n    UP_T0 = UP_T0 + [{n}]",
    "exec('UP_K0 = {n}')",
    "for UP_i in range({n}):\n    UP_T0.append(UP_i)",
    "globals().update(UP_K0={n})",
    "NAME_kept = NAME\ndef NAME(x):\n    return [{n}, NAME_kept(x)]",
    "def NAME_register(f):\n    UP_T0.append({n})\n    return f\n@NAME_register\ndef NAME_more(x):\n    return INNER",
    "UP_T1 = list(UP_T0) + [{n}]",
    "UP_made = NAME(2) if False else {n}",
)


def _expression(draw: random.Random, names: list[str]) -> str:
    parts = []
    for name in draw.sample(names, k=min(len(names), draw.randrange(1, 3))):
        last = name.rpartition(".")[2]
        parts.append(
            name if last[:2] in ("A_", "B_") else f"{name}(x)" if draw.random() < 0.8 else f"(x and {name}(x))"
        )
    return "[" + ", ".join(parts) + "]"


KEPT = (*ENTRIES, ADDED)
EDITS = ("number", "number", "number", "number", "delete", "swap", "effect", "copy body", "rename import")


def edit(project: Project, draw: random.Random) -> tuple[Project, str]:
    found = project.copy()
    file = draw.choice([found.base, found.helper, found.recipe, found.recipe])
    kind = draw.choice(EDITS)
    place = draw.randrange(len(file))
    part = file[place]
    if kind == "delete" and part.name not in KEPT:
        del file[place]
    elif kind == "swap":
        second = draw.randrange(len(file))
        file[place], file[second] = file[second], part
    elif kind == "effect":
        letter = "C" if file is found.base else "A" if file is found.helper else "B"
        text = draw.choice(EFFECTS).replace("UP", letter).replace("INNER", "x").replace("NAME", f"{letter.lower()}0")
        file.insert(place, Part(text, draw.randrange(9)))
    elif kind == "copy body":
        other = draw.choice(file)
        if part.name not in ("", *KEPT) and other.name not in ("", ADDED):
            part.text, part.number = other.text.replace(other.name, part.name), other.number
    elif kind == "rename import" and file is found.recipe:
        file[0].text = draw.choice(IMPORTS)
    elif kind == "rename import" and file is found.helper:
        file[0].text = draw.choice(AGAIN)
    else:
        part.number = part.number + 1 + draw.randrange(3)
        kind = "number"
    return found, f"{kind} at {place} ({part.name or part.source()!r})"


# -- execution --------------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """What a stage gave (None: it failed), and which functions of the project ran: (file, first line)."""

    output: str | None
    functions: set[tuple[str, int]]


def run_stages(sources: dict[str, str]) -> dict[str, Ran]:
    """Run every stage of a project, each with modules of its own; nothing for what is not Python."""
    compiled = {}
    for name, text in sources.items():
        try:
            module = name.rpartition("/")[2]
            compiled[module] = compile(text, f"{module}.py", "exec")
        except SyntaxError:
            return {}
    return {stage: _run_stage(stage, compiled) for stage in STAGES}


def _run_stage(stage: str, compiled: dict[str, CodeType]) -> Ran:
    functions: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in ("recipe.py", "helper_of_edits.py", "base_of_edits.py"):
            functions.add((code.co_filename, code.co_firstlineno))

    recipe = ModuleType("recipe")
    recipe.__file__ = "recipe.py"
    calls = {
        "prepare-data": ["prepare"],
        # Metrics are measured between two batches; what they return is not part of the weights.
        "train": ["build_model", "collate", "-compute_metrics", "collate", "build_model"],
        "evaluate": ["build_model", "collate", "compute_metrics"],
        "predict": ["build_model", "collate", "prediction_columns"],
    }[stage]
    output: list[Any] = []
    before, places = sys.gettrace(), [*sys.path]
    try:
        sys.settrace(trace)
        for name in ("base_of_edits", "helper_of_edits"):
            sys.modules[name] = ModuleType(name)
            exec(compiled[name], sys.modules[name].__dict__)
        exec(compiled["recipe"], recipe.__dict__)
        for name in calls:
            if name.startswith("-"):
                # A metric that fails ends the training, and a training that ended so has no result to compare.
                with contextlib.suppress(Exception):
                    getattr(recipe, name.removeprefix("-"))(5)
                continue
            output.append(repr(getattr(recipe, name)(5)))
    except Exception:
        # A stage that fails commits nothing.
        return Ran(None, functions)
    finally:
        sys.settrace(before)
        sys.path[:] = places
        for name in ("base_of_edits", "helper_of_edits"):
            sys.modules.pop(name, None)
    return Ran(repr(output), functions)


# -- keys -------------------------------------------------------------------------------------------------------------


def write(folder: Path, sources: dict[str, str]) -> Path:
    """Write the files, and return the recipe's."""
    for name, text in sources.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text)
    return folder / "recipe.py"


def reach_stages(recipe: Path) -> dict[str, Reach]:
    """What the key of each stage covers; evaluations of train choose nothing."""
    return reach_of(Resolver().code(recipe, None, recipe.parent))


def reach_of(code: Code) -> dict[str, Reach]:
    return {
        "prepare-data": code.reach(stage_code.PREPARE),
        "train": stage_code.reach_of_train(code, evaluations_choose=False),
        "evaluate": code.reach(stage_code.EVALUATE),
        "predict": stage_code.reach_of_predict(code),
    }


@dataclass
class Counts:
    """How many pairs of a stage and an edit were looked at, and how they ended."""

    edits: int = 0
    changed: int = 0
    kept: int = 0
    needless: int = 0


def check(seed: int, folder: Path, counts: Counts, edits: int = 6) -> None:
    """Make a project, edit it, and assert that no output changes under an unchanged key."""
    draw = random.Random(seed)
    project = make_project(draw)
    sources = project.sources()
    before, reached = run_stages(sources), reach_stages(write(folder, sources))
    for _ in range(edits):
        edited, what = edit(project, draw)
        now = edited.sources()
        after = run_stages(now)
        if not after:
            continue  # not Python
        again = reach_stages(write(folder, now))
        for stage in STAGES:
            same = again[stage].digests == reached[stage].digests
            if before[stage].output is None or after[stage].output is None:
                continue
            differs = before[stage].output != after[stage].output
            counts.edits += 1
            counts.changed += differs
            counts.kept += same
            counts.needless += not same and not differs
            assert not (same and differs), f"seed {seed}, {stage}: {what}\n{sources}\n{now}"


SPEC = "name: edits\nrecipe: recipe.py\nstorage: store\ntrain: {args: {use_cpu: true}}\n"
FACTS: dict[str, StageFacts] = {
    "prepare-data": PrepareFacts({}),
    "train": TrainFacts(),
    "evaluate": EvaluateFacts(),
    "predict": PredictFacts(1, "test"),
}


def _publish(plan: Plan) -> PublishFacts:
    to = publication_target(plan.spec.publish, plan.context)
    done = open_hub(to).publish(Content({}, {"README.md": b"published"}), message="again")
    return PublishFacts(done.target, done.url, done.revision, done.content_digest, done.created)


def _run(plan: Plan, outputs: dict[str, str | None]) -> dict[str, tuple[bool, str]]:
    """Run the plan's stages, each of which writes what the recipe really gives: stage -> (whether it ran, why)."""
    manifests: dict[str, StageManifest] = {}
    done: dict[str, tuple[bool, str]] = {}
    for name, planned in plan.stages.items():
        ran: list[str] = []
        inspect = partial(planned.stage.inspect, planned.config, plan.context)

        def work(attempt: StageAttempt, name: str = name, ran: list[str] = ran) -> StageOutput:
            ran.append(name)
            written = attempt.store.write_bytes("output", (outputs.get(name) or "published").encode())
            return StageOutput([written], facts=_publish(plan) if name == "push-to-hub" else FACTS[name])

        manifests[name] = run_stage(plan.key_of(name, manifests), plan.context, work, inspect=inspect)
        done[name] = (bool(ran), manifests[name].reason)
        if name in outputs:
            kept = manifests[name].store().read_bytes("output").decode()
            assert kept == outputs[name], f"{name} kept what another recipe made"
    return done


def _outputs_of(project: Project) -> dict[str, str | None] | None:
    """What each stage gives; None where one of them fails."""
    found = {stage: ran.output for stage, ran in run_stages(project.sources()).items()}
    return found if len(found) == len(STAGES) and None not in found.values() else None


def compare_plans_with_runs(folder: Path, seed: int, most: int) -> int:
    """Edit a random recipe up to `most` times; assert that runs do what is planned, and return the edits made."""
    (folder / "pyproject.toml").write_text("")
    (folder / "pipeline.yaml").write_text(SPEC)
    draw = random.Random(seed)
    project = make_project(draw)
    while _outputs_of(project) is None:
        project = make_project(draw)
    edits = 0
    for _ in range(60):
        if edits == most:
            break
        changed, what = edit(project, draw)
        outputs = _outputs_of(changed)
        if outputs is None:
            continue
        edits, project = edits + 1, changed
        write(folder, project.sources())
        if edits % 4 == 0:
            what = "the publication is damaged"
            for file in folder.glob("store/hub/*/revisions/*/README.md"):
                file.write_bytes(b"p")
        _manifests._verified.clear()
        plan = Plan.of(load_spec(folder / "pipeline.yaml"))
        planned = dict(plan.reasons)
        for name, (ran, reason) in _run(plan, outputs).items():
            told = planned[name]
            assert told.hit == (not ran) or not told.certain, f"{what}: {name} {told}"
            if ran and told.key is not None:
                assert told.reason == reason, what
        assert all(each.hit for each in Plan.of(load_spec(folder / "pipeline.yaml")).reasons.values()), what
    return edits


def main() -> None:
    """Check as many seeds as the command line asks for, and print the counts."""
    first, counts = int(sys.argv[2]) if len(sys.argv) > 2 else 0, Counts()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + int(sys.argv[1])):
            check(seed, Path(folder), counts)
    print(counts)


if __name__ == "__main__":
    main()
