"""Bad input as its user meets it: what is wrong, where, why and what to do; the right exit code; nothing half-done.

What the spec alone can tell is refused before an engine is started. What shows only when the recipe runs ends the stage
that it happens in: what was committed before stays, and the same command goes on once the cause is repaired.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import toy
from tests.support.command import Cli, Done
from tests.support.runs import IN_PROCESS, run
from tests.support.s3 import NOWHERE, S3_AWAY

# The data has a file of its own, so that a change of the model's file does not prepare it again.
DATA, MODEL = toy.RECIPE.split("def build_model")
MODEL = f"def build_model{MODEL}"
SPEC = toy.SPEC.replace("prepare:\n", "prepare:\n  recipe: data.py\n").replace("rows: 64", "rows: 32")
WITH_LOSS = 'return {"loss": ((y - labels) ** 2).mean(), "logits": y}'
COLLATED = "\n\ndef collate(rows):\n    import torch\n\n    return {%s}\n"


def project(folder: Path, *, data: str = DATA, model: str = MODEL, storage: Path | None = None) -> Path:
    """A project whose recipe is in two files; the path of its spec."""
    spec = toy.project(folder, recipe=model, spec=SPEC)
    (folder / "data.py").write_text(data)
    if storage is not None:
        spec.write_text(spec.read_text().replace("storage: store", f"storage: {storage}"))
    return spec


def told(done: Done, code: int, title: str) -> dict[str, str]:
    """The message of a failed command, by its rows; checked for what every message must have."""
    assert done.code == code, done.out + done.err
    assert "Traceback" not in done.out + done.err
    first, *lines = done.err.splitlines()
    assert first == f"✗ {title}"
    rows = dict(re.findall(r"^  (where|why|do|more) +(\S.*)$", "\n".join(lines), re.M))
    assert {"where", "why", "do"} <= set(rows), done.err
    return rows


def committed(storage: Path) -> set[Path]:
    """The commit files of stages: what counts as complete."""
    return set(storage.glob("stages/*/*/COMMIT.json"))


# ------------------------------------------------------------------------------------- refused before anything starts
@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which every command is refused."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "file").write_text("x")
    (folder / "broken.py").write_text("def prepare(options, out):\n    return {'train': [)}\n")
    (folder / "half.py").write_text("def prepare(options, out): ...\n")
    return project(folder)


MANY = str((os.cpu_count() or 1) + 1)


# tests/unit/flows/test_bad_input_words.py has the words for a hundred other values.
@pytest.mark.parametrize(
    ("override", "where", "why", "do"),
    [
        ("predict.row_per_file=5", "predict.row_per_file = 5", "Unknown key", "'rows_per_file'"),
        ("train.args.seed", "train.args.seed", "has the form key=value", "for example train.args.seed=1"),
        ("recipe=broken.py", "broken.py", r"not valid Python: .*line 2", "Correct the file"),
        ("recipe=half.py", "half.py", "no function 'build_model'", "Define build_model"),
        ("storage=file", "file", "is a file, not a folder", "Choose a folder"),
        ("storage=file/below", "file/below", "A file stands where a folder is needed", "move that file away"),
        ("storage=/proc/trainflow", "/proc/trainflow", "Cannot write there", "another storage|permissions"),
        ("storage=/sys/trainflow", "/sys/trainflow", "Cannot write there", "another storage|permissions"),
        ("storage=s4://bucket/x", "storage = s4://bucket/x", "Unknown URL scheme 's4'", "s3://"),
        ("storage=gs://bucket/x", "storage = gs://", "a package that is not installed", r'"trainflow\[gcs\]"'),
        ("publish.to=gs://bucket/x", "publish.to = gs://", "a package that is not installed", r'"trainflow\[gcs\]"'),
        (f"train.launch.processes={MANY}", f"train.launch.processes = {MANY}", "cores?", "at most"),
        ("storage=s3://me:hf_0123@bucket/x", "storage", "A URL with a password", "environment variables"),
    ],
)
def test_what_the_spec_can_tell_is_refused_at_once(
    plain: Path, override: str, where: str, why: str, do: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain.parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    # An engine that starts would fail.
    done = cli("run", plain, override, cwd=folder, env={"PREFECT_API_URL": "http://127.0.0.1:9/api"})
    rows = told(done, 2, "bad input")
    assert done.out == ""
    assert where in rows["where"]
    assert re.search(why, rows["why"]), rows
    assert re.search(do, rows["do"]), rows
    assert "hf_0123" not in done.err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


SWEEP = "sweep={space: {train.args.seed: [1, 2]}, objective: test_error, direction: minimize, trials: 2}"


@pytest.mark.parametrize(
    ("command", "override", "where", "why"),
    [
        (
            "run",
            "storage=s3://bucket/x",
            "storage = s3://bucket/x",
            "the store does not answer (the connection is refused)",
        ),
        (
            "sweep",
            "storage=s3://bucket/x",
            "storage = s3://bucket/x",
            "the store does not answer (the connection is refused)",
        ),
        ("why", "storage=s3://bucket/x", "s3://bucket/x/", "the store does not answer (the connection is refused)"),
        ("why", f"prepare.sources=[{NOWHERE}/a]", f"{NOWHERE}/a", "cannot be reached: the connection is refused"),
        ("why", "prepare.sources=[s3://b/a]", "s3://b/a", "the store does not answer (the connection is refused)"),
    ],
)
def test_what_is_out_of_reach_is_named_in_plain_words(
    plain: Path, command: str, override: str, where: str, why: str, cli: Cli
) -> None:
    more = (SWEEP,) if command == "sweep" else ()
    done = cli(command, plain, override, *more, cwd=plain.parent, env=S3_AWAY)
    rows = told(done, 14, "storage out of reach")
    assert rows["where"].startswith(where)
    assert why in rows["why"]
    assert "Check the" in rows["do"]
    assert not re.search("Errno|urlopen|endpoint URL|HTTPConnection", done.out + done.err)


# ------------------------------------------------------------------------------------------ found when the recipe runs
@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A storage in which the sound recipe's stages are committed."""
    folder = project(tmp_path_factory.mktemp("ground")).parent
    run(folder, "predict.enabled=false", "publish.enabled=false").raise_for_error()
    return folder / "store"


@pytest.mark.usefixtures("prefect_server")
def test_the_same_command_works_once_its_cause_is_repaired(tmp_path: Path, cli: Cli) -> None:
    spec = project(tmp_path, data=DATA.replace('{"x": [x]', '{"x": [float("nan") if _ == 7 else x]'))
    words = ("run", spec, *IN_PROCESS, "predict.enabled=false", "publish.enabled=false")
    (tmp_path / "store").write_text("in the way")
    assert "is a file, not a folder" in told(cli(*words), 2, "bad input")["why"]
    (tmp_path / "store").unlink()
    nan = cli(*words)
    rows = told(nan, 11, "bad data")
    assert "NaN in split 'train', row 7, column 'x'" in rows["why"]
    assert "prepare.allow_nan=true" in rows["do"]
    assert re.search(r"^  train +skipped +prepare-data failed$", nan.out, re.M), nan.out
    assert committed(tmp_path / "store") == set()
    (tmp_path / "data.py").write_text(DATA)
    assert cli(*words).code == 0
    assert len(committed(tmp_path / "store")) == 3


@dataclass(frozen=True)
class Case:
    """A recipe or a spec that fails while it runs, and what has to be said of it."""

    stage: str  # that fails; those before it are found committed, or run
    code: int
    where: str
    why: str
    do: str
    data: str = DATA
    model: str = MODEL
    measures: str = ""
    spec: tuple[str, ...] = ()


CASES = {
    "prepare raises": Case(
        "prepare-data",
        10,
        "data.py:6 in prepare",
        "KeyError: 'slope'",
        "Fix the recipe",
        data=DATA.replace('out.info["slope"] = 2.0', 'raise KeyError("slope")'),
    ),
    "a row raises": Case(
        "prepare-data",
        10,
        "data.py:14 in points",
        "ZeroDivisionError",
        "Fix the recipe",
        data=DATA.replace("draw = random.Random(seed)", "draw = random.Random(seed / 0)"),
    ),
    "an empty split": Case(
        "prepare-data",
        11,
        "prepare = test",
        "split 'test' is empty",
        "Check the filters",
        data=DATA.replace("points(16, 1)", "points(0, 1)"),
    ),
    "build_model raises": Case(
        "train",
        10,
        "recipe.py:3 in build_model",
        "RuntimeError: no weights",
        "Fix the recipe",
        model=MODEL.replace("    import torch\n", '    import torch\n    raise RuntimeError("no weights")\n', 1),
    ),
    "collate raises": Case(
        "train",
        10,
        "recipe.py:25 in ",
        "KeyError: 'pixels'",
        "Fix the recipe",
        model=MODEL + COLLATED % '"x": torch.tensor([row["pixels"] for row in rows])',
    ),
    "a batch that forward does not take": Case(
        "train",
        2,
        "model",
        "The batch has pixels, labels; the model's forward takes x, labels",
        "Let collate",
        model=MODEL + COLLATED % '"pixels": torch.zeros(len(rows), 1), "labels": torch.zeros(len(rows), 1)',
    ),
    "a model without a loss": Case(
        "train",
        2,
        "model",
        "returned no loss but only logits; it was given x, labels",
        "Return the loss",
        model=MODEL.replace(WITH_LOSS, 'return {"logits": y}'),
    ),
    "compute_metrics raises": Case(
        "evaluate",
        10,
        "in compute_metrics",
        "AttributeError.*'prediction'",
        "Fix the recipe",
        measures=MODEL.replace("p.predictions -", "p.prediction -"),
        spec=("evaluate.recipe=measures.py",),
    ),
    "an unknown split": Case(  # refused before the training that comes before its use
        "train", 2, "evaluate.splits = tset", "no such split", "'test'", spec=("evaluate.splits=[test, tset]",)
    ),
}
TITLES = {2: "bad input", 10: "your code raised", 11: "bad data"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_shows_when_it_runs_ends_its_stage(ground: Path, case: Case, tmp_path: Path, cli: Cli) -> None:
    before = committed(ground)
    users = {str(tmp_path / name) for name in ("data.py", "recipe.py", "measures.py")}
    spec = project(tmp_path, data=case.data, model=case.model, storage=ground)
    (tmp_path / "measures.py").write_text(case.measures)
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    done = cli("run", spec, *IN_PROCESS, *case.spec, cwd=tmp_path, env=env)
    rows = told(done, case.code, TITLES[case.code])
    assert case.where in rows["where"]
    assert re.search(case.why, rows["why"]), rows
    assert case.do in rows["do"]
    if case.code == 10:  # kept in a file: what --debug would have shown, cut to the user's own frames
        assert {file for file, _, _ in frames(Path(rows["more"].split(" (")[0]).read_text())} <= users
    assert committed(ground) == before, "what was committed stays, and nothing else looks complete"
    outcomes = dict(re.findall(r"^  (\S+) +(cached|ran|failed|skipped)\b", done.out, re.M))
    order = ["prepare-data", "train", "evaluate", "predict", "push-to-hub"]
    place = order.index(case.stage)
    assert all(outcomes[stage] == "cached" for stage in order[:place]), done.out
    assert outcomes[case.stage] in ("failed", "skipped")
    assert all(outcomes[stage] == "skipped" for stage in order[place + 1 :]), done.out


def test_a_stage_alone_needs_what_comes_before_it(tmp_path: Path, cli: Cli, prefect_server: str) -> None:
    done = cli("run", project(tmp_path), "--only", "predict")
    rows = told(done, 2, "bad input")
    assert rows["where"] == "--only = predict"
    assert "prepare-data comes before it and has no committed result" in rows["why"]
    assert done.out == "", "no table of nothing"


@pytest.mark.usefixtures("prefect_server")
def test_a_traceback_is_shown_when_it_is_asked_for(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the run's files are kept
    done = cli("run", project(tmp_path, data=CASES["prepare raises"].data), *IN_PROCESS, "--debug")
    assert done.code == 10
    assert frames(done.err) == [(str(tmp_path / "data.py"), "6", "prepare")]


def frames(text: str) -> list[tuple[str, str, str]]:
    """File, line and function of the last traceback in a text (with --debug, Prefect's own come before it)."""
    shown = text[text.rindex("Traceback (most recent call last):") :]
    return re.findall(r'File "(.*)", line (\d+), in (\w+)', shown)
