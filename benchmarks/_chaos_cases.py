"""The cases of `benchmarks.chaos_pipeline`: which fault hits what, when, in which project; seed and number decide."""

from __future__ import annotations

import itertools
import random
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

STAGES = ("prepare-data", "train", "evaluate", "predict", "push-to-hub")
SIGNALLED = ("kill", "terminate", "hang up", "interrupt", "stop", "freeze")
"""The faults that are a signal to one process."""
QUICK = 10
"""The first cases train with one process: a second undisturbed run is not needed for them."""
# How often each fault of a family comes in one cycle; `draw_case` takes the families in turn.
FAMILIES: dict[str, dict[str, int]] = {
    "process": {"kill": 6, "terminate": 3, "hang up": 2, "interrupt": 1, "stop": 2, "freeze": 2, "power": 2,
                "drain": 2},
    "mlflow": {"away": 1, "outage": 1, "slow": 1, "silent": 1, "errors": 1, "killed": 1},
    "damage": {"flip": 2, "cut": 1, "swap": 1, "missing": 1, "folder": 1},
    "disk": {"storage": 2, "tmp": 1, "home": 1},
    "prefect": {"kill": 1, "terminate": 1, "hang up": 1, "stop": 1, "outage": 1, "slow": 1, "silent": 1},
    "twice": {"both": 2, "one killed": 1},
    "store": {"outage": 1, "slow": 1, "silent": 1},
}  # fmt: skip
# (stage, event, weight). Events: "start", "begin" (of an attempt), "step" (that checkpoint is committed), "save" (it is
# being written), "commit" (of the stage), "files" (of the publication), "closing" (the report is written), "time".
_EVENTS = (
    *(
        ("", "start", 1),
        ("prepare-data", "begin", 1),
        ("train", "begin", 2),
        ("train", "step", 4),
        ("train", "save", 3),
    ),
    *(("train", "commit", 1), ("evaluate", "begin", 2), ("predict", "begin", 2), ("push-to-hub", "begin", 2)),
    *(("push-to-hub", "files", 1), ("", "closing", 2)),
)


@dataclass(frozen=True)
class Moment:
    """When the fault comes, as it can be seen from outside.

    `pause` is the share of the stage's (of "time": the command's) usual seconds that pass after the event.
    """

    stage: str
    event: str
    step: int = 0
    pause: float = 0.0

    def __str__(self) -> str:
        step = f" {self.step}" if self.step else ""
        return f"{self.stage or 'command'}: {self.event}{step} + {self.pause:.2f}"


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        target: the process, the service, the disk, or the kind of file that the fault hits.
        whole: the storage is empty before; otherwise only the stage of `moment` has no result yet.
        own_engine: the command starts a Prefect server; otherwise it uses one that is up.
        at_once: the same command follows at once; otherwise after all processes of the first have ended.
        seconds: how long an outage, a stop, or a full disk lasts.
    """

    number: int
    seed: int
    family: str
    fault: str
    target: str
    moment: Moment
    whole: bool
    processes: int
    own_engine: bool
    tracked: bool
    at_once: bool
    seconds: float

    @property
    def kind(self) -> str:
        """Family and fault, as the table shows them."""
        return f"{self.family}: {self.fault}"

    def __str__(self) -> str:
        more = [f"{self.processes} processes"] * (self.processes > 1) + ["own Prefect server"] * self.own_engine
        extent = "whole" if self.whole else "one stage"
        return ", ".join([f"{self.kind} ({self.target})", str(self.moment), *more, extent])


def draw_case(seed: int, number: int, *, steps: tuple[int, ...], local: bool = True) -> Case:
    """Draw case `number`, from 0; `steps` are those after which the recipe saves.

    Without `local` there is no full disk, which needs mounts.
    """
    families = {name: faults for name, faults in FAMILIES.items() if local or name != "disk"}
    length = sum(sum(faults.values()) for faults in families.values())
    family, fault = _cycle(random.Random(f"{seed} cycle {number // length}"), families)[number % length]
    draw, is_quick = random.Random(f"{seed} case {number}"), number < QUICK
    moment = _draw_moment(draw, family, steps)
    target = _draw_target(draw, family, fault, moment)
    whole = family in ("store", "twice") or (draw.random() < 0.2 and not is_quick)
    many = moment.stage == "train" and family == "process" and (target == "agent" or draw.random() < 0.2)
    if many and is_quick:
        many, target = False, "worker" if target == "agent" else target
    return Case(
        number=number,
        seed=seed,
        family=family,
        fault=fault,
        target=target,
        moment=moment,
        whole=whole,
        processes=2 if many else 1,
        own_engine=target in ("embedded server", "home") or (family != "prefect" and draw.random() < 0.2),
        tracked=family in ("process", "mlflow", "twice") or draw.random() < 0.3,
        at_once=draw.random() < 0.5,
        seconds=round(draw.uniform(1.0, 6.0), 1),
    )


def _cycle(draw: random.Random, families: dict[str, dict[str, int]]) -> list[tuple[str, str]]:
    """All faults as often as the families say, the families in turn: a few cases already show all of them."""
    columns = []
    for family, faults in families.items():
        column = [(family, fault) for fault, count in faults.items() for _ in range(count)]
        draw.shuffle(column)
        columns.append(column)
    return [fault for row in itertools.zip_longest(*columns) for fault in row if fault is not None]


def _draw_moment(draw: random.Random, family: str, steps: tuple[int, ...]) -> Moment:
    if family == "store":  # its files cannot be watched without asking the store
        return Moment("", "time", pause=draw.random())
    [(stage, event, _)] = draw.choices(_EVENTS, weights=[weight for *_, weight in _EVENTS])
    step = draw.choice(steps) if event in ("step", "save") else 0
    return Moment(stage, event, step, round(draw.random(), 3))


def _draw_target(draw: random.Random, family: str, fault: str, moment: Moment) -> str:
    if fault in ("power", "drain"):
        return "all"
    if family == "process":
        launched = moment.stage in STAGES[:4] and moment.event != "commit"
        launched = launched and fault != "interrupt"  # Ctrl-C is for the orchestrator
        chosen = draw.choice(["orchestrator", "worker", "guard", "agent"]) if launched else "orchestrator"
        return "worker" if chosen == "agent" and moment.stage != "train" else chosen
    if family == "damage":
        return draw.choice(["result", "result", "result", "checkpoint", "commit", "publication", "record", "books"])
    if family == "disk":
        return fault
    if family == "prefect" and fault in SIGNALLED:
        return "embedded server"
    return "command" if family == "twice" else "server"


# ---------------------------------------------------------------------------------------------------------- projects

RECIPE = '''
"""Three classes of noisy points and a classifier that is easy to resume wrongly: dropout, BatchNorm, a schedule."""

import os
import random
import time


def prepare(options, out):
    out.info["classes"] = 3
    return {"train": points(options["rows"], 0), "validation": points(8, 1), "test": points(20, 2)}


def points(count, seed):
    draw = random.Random(seed)
    for number in range(count):
        x = [draw.gauss(0, 1) for _ in range(6)]
        yield {"row_id": number, "x": x, "labels": max(range(3), key=lambda at: x[at])}


def build_model(options, data):
    import torch

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(6, options["width"])
            self.norm = torch.nn.BatchNorm1d(options["width"])
            self.dropout = torch.nn.Dropout(options["dropout"])
            self.head = torch.nn.Linear(options["width"], data.info["classes"])

        def forward(self, x, labels=None):
            time.sleep(float(os.environ.get("CHAOS_FORWARD_S", "0")))  # there is time to be killed
            logits = self.head(self.dropout(torch.relu(self.norm(self.body(x.float())))))
            if labels is None:
                return {"logits": logits}
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    return Classifier()


def compute_metrics(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}
'''
FORWARD_S = "0.02"
_LAUNCH = "launch: {kind: process, processes: 1, threads: 1, grace_s: 5}"
SPEC = f"""
name: small
recipe: recipe.py
storage: store
prepare: {{options: {{rows: 48}}, {_LAUNCH}}}
train:
  eval_split: validation
  model: {{width: 8, dropout: 0.2}}
  args: {{seed: 1, max_steps: 12, per_device_train_batch_size: 4, global_batch_size: 8, learning_rate: 1.0e-2,
    lr_scheduler_type: cosine, warmup_steps: 2, logging_steps: 1, eval_strategy: steps, eval_steps: 4, save_steps: 2,
    save_total_limit: 2, use_cpu: true}}
  launch: {{processes: 1, threads: 1, grace_s: 5}}
evaluate: {{splits: [validation, test], {_LAUNCH}}}
predict: {{split: test, rows_per_file: 8, {_LAUNCH}}}
"""


@dataclass(frozen=True)
class Project:
    """A pipeline to run: settings of every command, and the optimizer steps after which it saves."""

    name: str
    overrides: Sequence[str]
    steps: tuple[int, ...]

    def copy_to(self, folder: Path) -> Path:
        """Write recipe and spec into `folder`, and return the spec's path."""
        if self.name == "digits":
            shutil.copytree(ROOT / "examples" / "digits", folder, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(parents=True)
            (folder / "recipe.py").write_text(textwrap.dedent(RECIPE))
            (folder / "pipeline.yaml").write_text(SPEC)
        (folder / "pyproject.toml").write_text(f"[project]\nname = '{self.name}'\n")
        return folder / "pipeline.yaml"


_DIGITS = "num_train_epochs=4 save_steps=10 eval_steps=20 logging_steps=5"
_ENDING = ("train.launch.grace_s=5", "train.launch.threads=1", "prepare.launch.grace_s=5")
PROJECTS = {
    "small": Project("small", (), tuple(range(2, 13, 2))),
    "digits": Project(
        "digits", (*(f"train.args.{word}" for word in _DIGITS.split()), *_ENDING), tuple(range(10, 81, 10))
    ),
}
