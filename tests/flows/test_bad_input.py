"""Bad input as its user meets it: what is wrong, where, why and what to do; the right exit code; nothing half-done.

What the spec alone can tell is refused before an engine is started. What shows only when the recipe runs ends the stage
that it happens in: what was committed before stays, and the same command goes on once the cause is repaired.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
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
PIXELS = '"x": torch.tensor([row["pixels"] for row in rows])'
ZEROS = '"pixels": torch.zeros(len(rows), 1), "labels": torch.zeros(len(rows), 1)'


def project(folder: Path, *, data: str = DATA, storage: Path | None = None) -> Path:
    """A project whose recipe is in two files; the path of its spec."""
    spec = toy.project(folder, recipe=MODEL, spec=SPEC)
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


AWAY = "the store does not answer (the connection is refused)"
SWEEP = "sweep={space: {train.args.seed: [1, 2]}, objective: test_error, direction: minimize, trials: 2}"


@pytest.mark.parametrize(
    ("command", "overrides", "where", "why"),
    [
        ("run", ["storage=s3://bucket/x"], "storage = s3://bucket/x", AWAY),
        ("sweep", ["storage=s3://bucket/x", SWEEP], "storage = s3://bucket/x", AWAY),
        ("why", ["storage=s3://bucket/x"], "s3://bucket/x/", AWAY),
        ("why", [f"prepare.sources=[{NOWHERE}/a]"], f"{NOWHERE}/a", "cannot be reached: the connection is refused"),
        ("why", ["prepare.sources=[s3://b/a]"], "s3://b/a", AWAY),
    ],
)
def test_what_is_out_of_reach_is_named_in_plain_words(
    plain: Path, command: str, overrides: list[str], where: str, why: str, cli: Cli
) -> None:
    done = cli(command, plain, *overrides, cwd=plain.parent, env=S3_AWAY)
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


# What fails while it runs: the file of the project, and what is edited there.
EDITS = {
    "prepare raises": ("data.py", 'out.info["slope"] = 2.0', 'raise KeyError("slope")'),
    "a row raises": ("data.py", "random.Random(seed)", "random.Random(seed / 0)"),
    "an empty split": ("data.py", "points(16, 1)", "points(0, 1)"),
    "build_model raises": (
        "recipe.py",
        "    import torch\n\n",
        '    import torch\n    raise RuntimeError("no weights")\n',
    ),
    "collate raises": ("recipe.py", "return Line()\n", f"return Line()\n{COLLATED % PIXELS}"),
    "a batch that forward does not take": ("recipe.py", "return Line()\n", f"return Line()\n{COLLATED % ZEROS}"),
    "a model without a loss": ("recipe.py", WITH_LOSS, 'return {"logits": y}'),
    "compute_metrics raises": ("measures.py", "p.predictions -", "p.prediction -"),
    "an unknown split": ("pipeline.yaml", "splits: [test]", "splits: [test, tset]"),
}
# The stage that fails (those before it are found committed, or run), the exit code, and what has to be said.
SAID = {
    "prepare raises": ("prepare-data", 10, "data.py:6 in prepare", "KeyError: 'slope'", "Fix the recipe"),
    "a row raises": ("prepare-data", 10, "data.py:14 in points", "ZeroDivisionError", "Fix the recipe"),
    "an empty split": ("prepare-data", 11, "prepare = test", "split 'test' is empty", "Check the filters"),
    "build_model raises": ("train", 10, "recipe.py:3 in build_model", "RuntimeError: no weights", "Fix the recipe"),
    "collate raises": ("train", 10, " in collate", "KeyError: 'pixels'", "Fix the recipe"),
    "a batch that forward does not take": (
        "train",
        2,
        "model",
        "The batch has pixels, labels; the model",
        "Let collate",
    ),
    "a model without a loss": ("train", 2, "model", "returned no loss but only logits; it was", "Return the loss"),
    "compute_metrics raises": ("evaluate", 10, "in compute_metrics", "AttributeError.*'prediction'", "Fix the recipe"),
    # Refused before the training that comes before its use.
    "an unknown split": ("train", 2, "evaluate.splits = tset", "no such split", "'test'"),
}
TITLES = {2: "bad input", 10: "your code raised", 11: "bad data"}


@pytest.mark.parametrize("case", SAID)
def test_what_shows_when_it_runs_ends_its_stage(ground: Path, case: str, tmp_path: Path, cli: Cli) -> None:
    before, (failing, code, where, why, do) = committed(ground), SAID[case]
    spec = project(tmp_path, storage=ground)
    (tmp_path / "measures.py").write_text(MODEL)
    file, old, new = EDITS[case]
    assert old in (tmp_path / file).read_text()
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new, 1))
    measures = ["evaluate.recipe=measures.py"] if file == "measures.py" else []
    done = cli("run", spec, *IN_PROCESS, *measures, cwd=tmp_path, env={"XDG_STATE_HOME": str(tmp_path / "state")})
    rows = told(done, code, TITLES[code])
    assert where in rows["where"]
    assert re.search(why, rows["why"]), rows
    assert do in rows["do"]
    if code == 10:  # kept in a file: what --debug would have shown, cut to the user's own frames
        kept = frames(Path(rows["more"].split(" (")[0]).read_text())
        assert {Path(name) for name, _, _ in kept} == {tmp_path / file}
    assert committed(ground) == before, "what was committed stays, and nothing else looks complete"
    outcomes = dict(re.findall(r"^  (\S+) +(cached|ran|failed|skipped)\b", done.out, re.M))
    order = ["prepare-data", "train", "evaluate", "predict", "push-to-hub"]
    place = order.index(failing)
    assert all(outcomes[stage] == "cached" for stage in order[:place]), done.out
    assert outcomes[failing] in ("failed", "skipped")
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
    done = cli("run", project(tmp_path, data=DATA.replace(*EDITS["prepare raises"][1:])), *IN_PROCESS, "--debug")
    assert done.code == 10
    assert frames(done.err) == [(str(tmp_path / "data.py"), "6", "prepare")]


def frames(text: str) -> list[tuple[str, str, str]]:
    """File, line and function of the last traceback in a text (with --debug, Prefect's own come before it)."""
    shown = text[text.rindex("Traceback (most recent call last):") :]
    return re.findall(r'File "(.*)", line (\d+), in (\w+)', shown)
