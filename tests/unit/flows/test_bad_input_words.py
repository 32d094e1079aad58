"""Bad input as users make it, and the words in which it is refused: whole sentences, without a library's own text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flows.spec.spec import load_spec
from tests.support import toy
from trainer_lib.errors import ConfigError

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
    ("storage=5", "not text", "Give text"),
    ("storage=null", "no value", "Give text"),
    ("storage=http://host/x", "none can be written", "AWS_ENDPOINT_URL"),
    ("prepare=5", "not a section", "prepare.NAME"),
    ("prepare.sources=data.csv", "not a list", "["),
    ("prepare.sources=[5]", "not text", "Give text"),
    ("prepare.shard_rows=many", "not a whole number", "Give a whole number."),
    ("prepare.shard_rows=1.5", "not a whole number", "Give a whole number."),
    ("prepare.shard_rows=0", "must be at least 1", "a number of at least 1"),
    ("prepare.allow_nan=perhaps", "neither true nor false", "Give true or false."),
    ("prepare.options=[1]", "not a mapping", "prepare.options.NAME=value"),
    ("prepare.retries=100", "must be at most 20", "at most 20"),
    ("train=fast", "not a section", "train.NAME"),
    ("train.args=5", "not a mapping", "train.args.NAME=value"),
    ("train.args.lr=1", "No argument has this name", '"learning_rate"'),
    ("train.args.epochs=1", "No argument has this name", '"num_train_epochs"'),
    ("train.args.batch_size=1", "No argument has this name", '"per_device_train_batch_size"'),
    ("train.args.data_collator=mine", "The Trainer takes this", "define collate"),
    ("train.args.callbacks=mine", "The Trainer takes this", "define callbacks"),
    ("train.args.learning_rate=fast", "not a finite number", "0.001"),
    ("train.args.learning_rate=-1", "at least 0", "at least 0"),
    ("train.args.max_steps=1.5", "not a whole number", "a whole number"),
    ("train.args.bf16=perhaps", "not a truth value", "true or false"),
    ("train.args.optim=adam_w", "not one of the choices", "Did you mean"),
    ("train.args.no_cuda=maybe", "not a truth value", "true or false"),
    ("train.args.per_gpu_train_batch_size=0", "at least 1", "a number of at least 1"),
    ("train.args={1: 2}", "A name has to be text", "in quotes"),
    ("prepare.sources=['']", "The name of a source is empty", "Name a file"),
    ("train.model=big", "not a mapping", "train.model.NAME=value"),
    ("train.launch=5", "not a section", "train.launch.NAME"),
    ("train.launch=tochrun", "not one of the choices", '"torchrun"'),
    ("train.launch.kind=5", "not one of the choices", "torchrun, process"),
    ("train.launch.processes=0", "at least 1", "at least 1"),
    ("train.launch.processes=many", 'neither a whole number nor "auto"', 'a whole number or "auto"'),
    ("train.launch.threads=-1", "at least 1", "at least 1"),
    ("train.launch.timeout_s=soon", "not a number", "Give a number."),
    ("train.launch.timeout_s=0", "must be above 0", "above 0"),
    ("train.launch.env=[A]", "not a mapping", "train.launch.env.NAME=value"),
    ("train.launch.env={A: 1}", "not text", "in quotes"),
    ("train.launch.devices=all", "not a list", "Give a list: [all]."),
    ("train.launch.nodes=two", "does not have the form", '"1:4"'),
    ("train.launch.rendezvous=5", "not text", "Give text"),
    ("train.train_split=", "no value", "Give text"),
    ("train.eval_split=[a]", "not text", "Give text"),
    ("train.nonsense.deep=1", "Unknown key", "Known here"),
    ("evaluate.splits=test", "not a list", "Give a list: [test]."),
    ("evaluate.splits=[]", "at least 1 entry", "Fill it"),
    ("evaluate.splits=[1]", "not text", "in quotes"),
    ("evaluate.enabled=maybe", "neither true nor false", "true or false"),
    ("evaluate.launch.timeout_s=x", "not a number", "Give a number."),
    ("predict.rows_per_file=lots", "not a whole number", "a whole number"),
    ("predict.split=null", "no value", "Give text"),
    ("predict.args.per_device_eval_batch_size=many", "not a whole number", "a whole number"),
    ("publish.private=2", "neither true nor false", "true or false"),
    ("publish.tags=good", "not a list", "Give a list: [good]."),
    ("publish.to=http://x/y", "none can be written", "Give a folder"),
    ("publish.license=[mit]", "not text", "Give text"),
    ("tracking.enabled=5", "neither true nor false", "true or false"),
    ("tracking.uri=nonsense://x", "MLflow knows no scheme 'nonsense'", "sqlite"),
    ("tracking.tags=a", "not a mapping", "tracking.tags.NAME=value"),
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
        (
            "launch: {kind: process, processes: 1}",
            "launch: {kind: proces}",
            "prepare.launch.kind",
            "one of the choices",
        ),
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


def test_an_override_that_is_refused_as_a_secret_is_not_repeated(spec: Path) -> None:
    error = refused(spec, "train.args.hub_token=hf_0123456789")
    assert "from the command line: train.args.hub_token=…" in error.message
    assert "0123456789" not in str(error)


# ------------------------------------------------------------------------------------------------------------- recipes
SIGNATURES = [
    ("def prepare(options):\n    return {}", "prepare(options) cannot be called as prepare(options, out)."),
    ("def prepare(options, out, more):\n    return {}", "prepare(options, out, more) cannot be called as"),
    ("def build_model(options):\n    pass", "build_model(options) cannot be called as build_model(options, data)."),
    ("def collate():\n    pass", "collate() cannot be called as collate(rows)."),
    ("def compute_metrics(predictions, labels):\n    pass", "cannot be called as compute_metrics(p)."),
    ("def outcome_pairs(predictions, labels):\n    pass", "cannot be called as outcome_pairs(p)."),
    ("def preprocess_logits_for_metrics(logits):\n    pass", "(logits, labels)."),
    ("def compute_loss_func(outputs):\n    pass", "compute_loss_func(outputs, labels, num_items_in_batch)."),
    ("def callbacks():\n    return []", "callbacks() cannot be called as callbacks(options)."),
    ("def prediction_columns(predictions):\n    pass", "(predictions, data)."),
    ("def after_evaluate(model):\n    pass", "after_evaluate(model, data, options)."),
    ("def collate(rows, *, width):\n    pass", "collate(rows, *, width) cannot be called as collate(rows)."),
]


@pytest.mark.parametrize(("function", "why"), SIGNATURES)
def test_a_function_that_cannot_be_called_is_refused_before_anything_starts(
    tmp_path: Path, function: str, why: str
) -> None:
    spec = toy.project(tmp_path)
    (tmp_path / "own.py").write_text(function + "\n")
    error = refused(spec, f"evaluate.recipe={tmp_path / 'own.py'}")
    assert (error.field, error.value) == ("evaluate.recipe", str(tmp_path / "own.py"))
    assert why.removesuffix(".") in error.message
    assert str(error.remedy).startswith("Define it as def ")


@pytest.mark.parametrize(
    "function",
    [
        "def compute_loss_func(outputs, labels):\n    pass",
        "def compute_loss_func(outputs, labels, num_items_in_batch=None):\n    pass",
        "def compute_metrics(p, compute_result=True):\n    pass",
        "def collate(rows, width=3, /, *more, pad=0, **others):\n    pass",
        "def collate(*args):\n    pass",
        "import functools\n\n\n@functools.cache\ndef collate(width, height):\n    pass",
    ],
)
def test_a_function_that_can_be_called_is_accepted(tmp_path: Path, function: str) -> None:
    spec = toy.project(tmp_path)
    (tmp_path / "own.py").write_text(function + "\n")
    load_spec(spec, [f"evaluate.recipe={tmp_path / 'own.py'}"])


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
    error = refused(spec, "register.name=line", f"register.metric={metric}")
    assert error.field == "register.metric"
    assert wrong in error.message, error
    assert do in str(error.remedy), error


def test_metrics_that_are_known_only_when_they_are_measured_are_accepted(tmp_path: Path) -> None:
    returns = 'return {"error": float(abs(p.predictions - p.label_ids).mean())}'
    for number, other in enumerate(("return dict(other=1.0)", 'return {**known, "error": 1.0}', "yield 1")):
        folder = tmp_path / str(number)
        recipe = toy.RECIPE.replace(returns, other)
        assert recipe != toy.RECIPE
        spec = toy.project(folder, recipe=recipe)
        assert load_spec(spec, ("register.name=line", "register.metric=test_other")).register.metric == "test_other"
    bare = toy.RECIPE.replace("def compute_metrics", "def other")
    spec = toy.project(tmp_path / "bare", recipe=bare)
    assert "no compute_metrics" in refused(spec, "register.name=line", "register.metric=test_error").message
    left_out = refused(spec, "register.name=line", "register.metric=test_error", "evaluate.enabled=false")
    assert "which the spec leaves out" in left_out.message


def test_a_flavor_is_refused_without_a_registered_model_and_by_another_name(spec: Path) -> None:
    alone = refused(spec, "register.flavor=transformers")
    assert (alone.field, alone.value) == ("register.flavor", "transformers")
    assert "Set register.name" in str(alone.remedy)
    other = refused(spec, "register.name=line", "register.flavor=transformer")
    assert other.field == "register.flavor"
    assert "transformers" in str(other.remedy)
