"""Words of a command and of a spec: what does not fit is refused alike; help ends with examples that are commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support import toy
from tests.support.command import TRAINFLOW, Done
from trainer_lib.errors import ConfigError, OutOfMemoryError
from trainflow.flows.cli import main as front_door
from trainflow.flows.cli.main import application, main
from trainflow.flows.spec.spec import load_spec

TO_BE_SEEN = ("return dict(other=1.0)", 'return {**known, "error": 1.0}', "yield 1")
RETURNS = 'return {"error": float(abs(p.predictions - p.label_ids).mean())}'


def _commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(_commands(typer.main.get_command(application())))


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """A command that is refused; returns its rows by name, and what it wrote on standard output."""

    def run(*words: str) -> dict[str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capsys.readouterr()
        assert not re.search("Usage:|╭", out + err), out + err
        rows = Done(int(str(ended.value.code)), out, err).failure()
        assert all(rows[name].endswith((".", "?")) for name in ("why", "do")), err
        return {**rows, "out": out}

    return run


@pytest.mark.parametrize(
    ("words", "where", "why", "do"),
    [
        ("gc --kep=3", "--kep", "No such option: --kep (Possible options:", "trainflow gc --help"),
        ("gc --keep many", "--keep", "Invalid value for '--keep': ", "trainflow gc --help"),
        ("gc --keep 0", "--keep", "greater than or equal to 1", "trainflow gc --help"),
        ("gc --keep", "--keep", "requires an argument", "--help"),
        ("logs", "RUN", "Missing argument 'RUN'.", "trainflow logs --help"),
        ("verify", "X", "Missing argument 'X'.", "An example: trainflow verify last; trainflow verify --help shows"),
        ("checkpoints prune x", "--keep", "Missing option '--keep'.", "trainflow checkpoints prune --help"),
        ("rnus", "trainflow", "No such command 'rnus'. Did you mean 'runs'?", "trainflow --help"),
        ("checkpoints lst", "trainflow checkpoints", "Did you mean 'list'?", "trainflow checkpoints --help"),
        ("schema spec.yaml", "trainflow schema", "unexpected extra argument(s) (spec.yaml)", "trainflow schema --help"),
    ],
)
def test_words_that_do_not_fit(refuse: Any, words: str, where: str, why: str, do: str) -> None:
    rows = refuse(*words.split())
    assert rows["where"] == where
    assert why in rows["why"]
    assert do in rows["do"]
    record = json.loads(refuse(*words.split(), "--json")["out"])
    # Of a command without --json it is the option that is refused, in JSON all the same.
    assert record["error"]["field"] in (where, "--json")
    assert (record["ok"], record["exit_code"], record["error"]["class"]) == (False, 2, "ConfigError")


@pytest.mark.parametrize("words", ["--help", "gc -h", "checkpoints --help", "--version", "", "checkpoints"])
def test_help_and_version_end_well(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    out, err = capsys.readouterr()
    if "-" in words:
        assert not ended.value.code
        assert "trainflow" in out and err == ""
    else:  # without a command the help is shown
        assert ended.value.code == 2
        assert "Commands" in out + err and "✗" not in err


@pytest.mark.parametrize("words", [["runs", "--lmit", "1", "--json"], ["--help"]])
def test_nothing_complains_when_the_reader_of_the_output_has_ended(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*TRAINFLOW, *words]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writer)
    assert done.returncode == (2 if "--json" in words else 1), done.stderr
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
    assert ("--lmit" in done.stderr) == ("--json" in words)


def test_memory_that_is_used_up_is_not_called_a_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(front_door, "_call", exhausted)
    with pytest.raises(SystemExit) as ended:
        main(["runs"])
    assert ended.value.code == OutOfMemoryError.exit_code
    assert "The memory that this process may take is used up." in " ".join(capsys.readouterr().err.split())


NAMED = {" ".join(path): command for path, command in COMMANDS.items()}
_SERVES = "It is at work until it is ended, and has no result."
NO_JSON = {
    "ui": _SERVES,
    "serve": _SERVES,
    "join": "Its result is that of the machine that leads.",
    "schema": "What it prints is JSON.",
}
NO_QUIET = {"ui": "The links are all that it prints.", "schema": "The schema is all that it prints."}


def test_every_command_has_examples() -> None:
    assert [name for name, command in NAMED.items() if "trainflow" not in (command.epilog or "")] == []


@pytest.mark.parametrize(("option", "reasons"), [("--json", NO_JSON), ("--quiet", NO_QUIET)])
def test_every_command_but_those_with_a_reason_has_the_option(option: str, reasons: dict[str, str]) -> None:
    without = {name for name, command in NAMED.items() if not any(option in each.opts for each in command.params)}
    assert without == set(reasons)


@pytest.mark.parametrize("name", NAMED)
def test_an_example_is_understood(name: str) -> None:
    for line in NAMED[name].epilog.split("\n\n")[1:]:
        words = shlex.split(line)
        assert words[: 1 + len(name.split())] == ["trainflow", *name.split()]
        # Parses and checks the words, and calls nothing; raises click's usage errors.
        NAMED[name].make_context(name, words[1 + len(name.split()) :])


# -- words of a spec: refused in whole sentences, without a library's own text -----------------------------------------
RAW = re.compile(
    r"Input should|String should|List should|valid (string|integer|number|boolean|dictionary|list|tuple)|pydantic|"
    r"Errno|urlopen|HTTPConnection|botocore|NoneType|Traceback|\(on the command line\)|after validation"
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tracked = toy.SPEC.replace("tracking: {enabled: false}", "tracking: {enabled: true}")
    return toy.project(tmp_path_factory.mktemp("words"), spec=tracked)


def refused(spec: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_spec(spec, overrides)
    return caught.value


TABLE = [
    # override | what is wrong | what to do
    ("name=5", "not text", "in quotes"),
    ("name=", "no value", "Give text"),
    ("name=a b", "does not have the form", "letters, digits"),
    ("recipe=5", "not text", "Give text"),
    ("recipe=.", "a folder, not a file", "Python file"),
    ("recipe=README.txt", "no such file", "Python file"),
    ("root=nowhere", "no such folder", "leave it out"),
    ("storage=http://host/x", "none can be written", "AWS_ENDPOINT_URL"),
    ("prepare=5", "not a section", "prepare.NAME"),
    ("prepare.sources=data.csv", "not a list", "["),
    ("prepare.sources=[5]", "not text", "Give text"),
    ("prepare.shard_rows=many", "not a whole number", "Give a whole number."),
    ("prepare.shard_rows=0", "must be at least 1", "a number of at least 1"),
    ("prepare.allow_nan=perhaps", "neither true nor false", "Give true or false."),
    ("prepare.options=[1]", "not a mapping", "prepare.options.NAME=value"),
    ("prepare.retries=100", "must be at most 20", "at most 20"),
    ("train.args=5", "not a mapping", "train.args.NAME=value"),
    ("train.args.lr=1", "No argument has this name", '"learning_rate"'),
    ("train.args.epochs=1", "No argument has this name", '"num_train_epochs"'),
    ("train.args.data_collator=mine", "The Trainer takes this", "define collate"),
    ("train.args.learning_rate=fast", "not a finite number", "0.001"),
    ("train.args.learning_rate=-1", "at least 0", "at least 0"),
    ("train.args.bf16=perhaps", "not a truth value", "true or false"),
    ("train.args.optim=adam_w", "not one of the choices", "Did you mean"),
    ("train.args.per_gpu_train_batch_size=0", "at least 1", "a number of at least 1"),
    ("train.args={1: 2}", "A name has to be text", "in quotes"),
    ("prepare.sources=['']", "The name of a source is empty", "Name a file"),
    ("train.model=big", "not a mapping", "train.model.NAME=value"),
    ("train.launch=5", "not a section", "train.launch.NAME"),
    ("train.launch=tochrun", "not one of the choices", '"torchrun"'),
    ("train.launch.kind=5", "not one of the choices", "torchrun, process"),
    ("train.launch.processes=many", 'neither a whole number nor "auto"', 'a whole number or "auto"'),
    ("train.launch.timeout_s=soon", "not a number", "Give a number."),
    ("train.launch.timeout_s=0", "must be above 0", "above 0"),
    ("train.launch.devices=all", "not a list", "Give a list: [all]."),
    ("train.launch.nodes=two", "does not have the form", '"1:4"'),
    ("train.launch.rendezvous=5", "not text", "Give text"),
    ("train.nonsense.deep=1", "Unknown key", "Known here"),
    ("evaluate.splits=[]", "at least 1 entry", "Fill it"),
    ("predict.split=null", "no value", "Give text"),
    ("predict.args.per_device_eval_batch_size=many", "not a whole number", "a whole number"),
    ("tracking.enabled=5", "neither true nor false", "true or false"),
    ("tracking.uri=nonsense://x", "MLflow knows no scheme 'nonsense'", "sqlite"),
    ("tracking.tags={a: 1}", "not text", "in quotes"),
    ("nonsense=1", "Unknown key", "Known here: name, recipe"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # old names of arguments
@pytest.mark.parametrize(("override", "why", "do"), TABLE, ids=[row[0] for row in TABLE])
def test_a_wrong_value_is_refused_in_the_users_words(
    spec: Path, override: str, why: str, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spec.parent)
    error = refused(spec, override)
    key = override.partition("=")[0]
    assert error.field is not None
    assert key.startswith(error.field) or error.field.startswith(key)
    assert why in error.message
    assert f"from the command line: {key}=…" in error.message
    assert do in str(error.remedy)
    assert not RAW.search(str(error)), str(error)
    assert error.message[0].isupper()
    assert error.message.endswith(".")
    assert str(error.remedy)[-1] in ".?"


@pytest.mark.parametrize(
    ("old", "new", "field", "why"),
    [
        ("storage: store", "storage: [store]", "storage", "not text"),
        ("max_steps: 8", "max_steps: eight", "train.args.max_steps", "not a whole number"),
        ("{kind: process, processes: 1}", "{kind: proces}", "prepare.launch.kind", "one of the choices"),
        ("evaluate: {splits: [test]}", "evaluate: {split: [test]}", "evaluate.split", "Unknown key"),
        ("tracking: {enabled: false}", "tracking: no", "tracking", "not a section"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, old: str, new: str, field: str, why: str) -> None:
    path = toy.project(tmp_path, spec=toy.SPEC.replace(old, new))
    error = refused(path)
    assert error.field == field
    assert why in error.message
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if new.split(":")[0] in text)
    assert re.search(rf"\({re.escape(str(path))}, line ({line}|{line - 1}|{line + 1})\)", error.message), error.message
    assert not RAW.search(str(error))


@pytest.mark.parametrize(
    ("variable", "value", "override", "why"),
    [
        ("HF_ENDPOINT", "nonsense", "publish.to=hf://me/x", "This is not the address of a server."),
        ("AWS_ENDPOINT_URL", "host:9000", "storage=s3://bucket/x", "This is not the address of a server."),
        ("MLFLOW_TRACKING_URI", "nonsense://x", "tracking.enabled=true", "MLflow knows no scheme 'nonsense'."),
    ],
)
def test_a_variable_of_the_environment_is_named_and_no_file(
    spec: Path, variable: str, value: str, override: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    error = refused(spec, override)
    assert (error.field, error.value, error.message) == (variable, value, why)


# ------------------------------------------------------------------------------------------------------------- recipes
SIGNATURES = [
    ("prepare(options)", "prepare(options) cannot be called as prepare(options, out)"),
    ("prepare(options, out, more)", "prepare(options, out, more) cannot be called as"),
    ("build_model(options)", "build_model(options) cannot be called as build_model(options, data)"),
    ("collate()", "collate() cannot be called as collate(rows)"),
    ("compute_metrics(predictions, labels)", "cannot be called as compute_metrics(p)"),
    ("outcome_pairs(predictions, labels)", "cannot be called as outcome_pairs(p)"),
    ("preprocess_logits_for_metrics(logits)", "(logits, labels)"),
    ("compute_loss_func(outputs)", "compute_loss_func(outputs, labels, num_items_in_batch)"),
    ("callbacks()", "callbacks() cannot be called as callbacks(options)"),
    ("prediction_columns(predictions)", "(predictions, data)"),
    ("after_evaluate(model)", "after_evaluate(model, data, options)"),
    ("collate(rows, *, width)", "collate(rows, *, width) cannot be called as collate(rows)"),
    ("metric_sums(p)", "metric_sums() of a recipe is not called any more"),
    ("compute_loss_func(outputs, labels)", None),
    ("compute_loss_func(outputs, labels, num_items_in_batch=None)", None),
    ("compute_metrics(p, compute_result=True)", None),
    ("collate(rows, width=3, /, *more, pad=0, **others)", None),
    ("collate(*args)", None),
]


@pytest.mark.parametrize(("function", "why"), SIGNATURES)
def test_a_function_that_cannot_be_called_is_refused_before_anything_starts(
    tmp_path: Path, function: str, why: str | None
) -> None:
    spec, own = toy.project(tmp_path), tmp_path / "own.py"
    if why is None:
        for cached in ("", "import functools\n\n\n@functools.cache\n"):
            own.write_text(f"{cached}def {function}:\n    pass\n")
            load_spec(spec, [f"evaluate.recipe={own}"])
        return
    own.write_text(f"def {function}:\n    pass\n")
    error = refused(spec, f"evaluate.recipe={own}")
    assert (error.field, error.value) == ("evaluate.recipe", str(own))
    assert why in error.message
    assert str(error.remedy).startswith("Define it as def ")
    own.write_text(f"import functools\n\n\n@functools.cache\ndef {function}:\n    pass\n")
    load_spec(spec, [f"evaluate.recipe={own}"])  # what a decorator takes is not known


@pytest.mark.parametrize(
    ("metric", "wrong", "do"),
    [
        ("''", "begins with that of a split", "'test_"),
        ("error", "begins with that of a split in evaluate.splits", "'test_error'"),
        ("test_", "begins with that of a split", "'test_"),
        ("train_error", "begins with that of a split", "test_"),
        ("test_eror", "compute_metrics returns no such metric", "test_error"),
        ("test_loss", "compute_metrics returns no such metric", "test_error"),
    ],
)
def test_a_metric_that_no_evaluation_gives_is_refused_with_the_spec(
    spec: Path, metric: str, wrong: str, do: str
) -> None:
    for field, more in (("register.metric", "register.name=line"), ("publish.metric", "publish.only_if=better")):
        error = refused(spec, more, f"{field}={metric}")
        assert error.field == field
        assert wrong in error.message and do in str(error.remedy), error
    assert "names none" in refused(spec, "publish.only_if=better").message


def test_metrics_that_are_known_only_when_they_are_measured_are_accepted(tmp_path: Path) -> None:
    spec, other = toy.project(tmp_path), ("register.name=line", "register.metric=test_other")
    for recipe in (toy.RECIPE.replace(RETURNS, returns) for returns in TO_BE_SEEN):
        assert recipe != toy.RECIPE
        (tmp_path / "recipe.py").write_text(recipe)
        assert load_spec(spec, other).register.metric == "test_other"
    (tmp_path / "recipe.py").write_text(toy.RECIPE.replace("def compute_metrics", "def other"))
    assert "no compute_metrics" in refused(spec, "register.name=line", "register.metric=test_error").message
    assert "which the spec leaves out" in refused(spec, *other, "evaluate.enabled=false").message


def test_a_flavor_is_refused_without_a_registered_model_and_by_another_name(spec: Path) -> None:
    alone = refused(spec, "register.flavor=transformers")
    assert (alone.field, alone.value) == ("register.flavor", "transformers")
    assert "Set register.name" in str(alone.remedy)
    other = refused(spec, "register.name=line", "register.flavor=transformer")
    assert other.field == "register.flavor"
    assert "transformers" in str(other.remedy)
