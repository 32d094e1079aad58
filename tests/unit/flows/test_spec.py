"""Reading a spec: what is accepted, and how everything else is refused before any engine is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy import project
from trainer_lib.errors import ConfigError
from trainer_lib.protocol.requests import PreparedSplit
from trainflow.flows.cli.options import PlaceWords, choose_spec_file
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.checks import check_splits
from trainflow.flows.spec.spec import (
    _SECTION_PATHS,
    PipelineSpec,
    _section_paths,
    load_spec,
    parse_spec,
)
from trainflow.flows.spec.spec_file import read_spec_file

PLACES = ("//name", "///name", "//a/b/c", "/a/b", "a/b", "//a--b/c", "//a/b.git", "//a/b@")
ADDRESSES = [*(f"hf:{place}" for place in PLACES), "HF://a/b"]
LEVELS = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
LEVELS += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
SPEC = "name: toy\nrecipe: recipe.py\n"


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def refused(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_spec(path, overrides)
    return caught.value


def test_a_mistake_in_sweep_stops_nothing_that_leaves_it_aside(
    spec_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = spec_file.read_text()
    spec_file.write_text(f"{plain}\nsweep: {{space: {{}}, objektive: test_error}}\n")
    assert load_spec(spec_file, needs_sweep=False).sweep is None
    for command in ("models", "lineage"):  # they read where the runs are
        assert PlaceWords([str(spec_file)], None).choose(command).storage
    assert "trainflow sweep names" in caplog.text
    assert "objective" in str(refused(spec_file))
    whole = "{space: {train.args.seed: [1, 2]}, objective: a_b, direction: minimize, trials: 1}"
    spec_file.write_text(f"{plain}\nsweep: {whole}\n")
    assert load_spec(spec_file, needs_sweep=False).sweep is not None


def test_paths_in_the_file_start_from_its_folder_and_overridden_ones_from_the_working_directory(
    spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    spec = load_spec(spec_file, ["storage=./here", "publish.to=../hub"])
    assert (spec.recipe, spec.root) == (str(spec_file.parent / "recipe.py"), str(spec_file.parent))
    assert (spec.storage, spec.publish.to) == (str(elsewhere / "here"), str(tmp_path / "hub"))
    assert load_spec(spec_file).storage == str(spec_file.parent / "store")
    monkeypatch.chdir("/")
    # URLs, named sources and JSON on the command line are no paths.
    sources, settings = ["package:numpy", "stdlib:json", str(spec_file)], '{"non_blocking": false}'
    words = [f"prepare.sources={json.dumps(sources)}", f"train.args.accelerator_config='{settings}'"]
    spec = load_spec(spec_file, ["storage=s3://bucket/x", *words])
    assert (spec.storage, spec.prepare.sources) == ("s3://bucket/x", sources)
    assert spec.train.args["accelerator_config"] == settings
    assert parse_spec(spec.model_dump(mode="json")) == spec, "a resolved spec can be written and read again"


def test_a_recipe_of_its_own_starts_from_the_folder_of_the_file(spec_file: Path) -> None:
    (spec_file.parent / "own.py").write_text((spec_file.parent / "recipe.py").read_text())
    raw, sections = read_spec_file(spec_file)[0], ("prepare", "train", "evaluate", "predict")
    spec_file.write_text(json.dumps({**raw, **{name: {**raw.get(name, {}), "recipe": "own.py"} for name in sections}}))
    spec, own = load_spec(spec_file), str(spec_file.parent / "own.py")
    assert {name: getattr(spec, name).recipe for name in sections} == dict.fromkeys(sections, own)


def test_every_path_of_a_section_starts_from_the_folder_of_the_file() -> None:
    sections = ("prepare", "train", "evaluate", "predict")
    paths = {f"{name}.{path}" for name in sections for path in _SECTION_PATHS.values()}
    files = ("deepspeed", "fsdp_config", "accelerator_config")
    of_arguments = {f"{name}.args.{file}" for name in ("train", "evaluate", "predict", "publish") for file in files}
    assert set(_section_paths()) == paths | of_arguments | {"publish.recipe"}


def test_a_file_that_an_argument_names_lies_beside_the_spec_and_is_checked_like_a_mapping(spec_file: Path) -> None:
    file = spec_file.parent / "zero.json"
    raw = read_spec_file(spec_file)[0]
    raw["train"]["args"]["deepspeed"] = "zero.json"
    spec_file.write_text(json.dumps(raw))
    missing = refused(spec_file)
    assert (missing.field, missing.value) == ("train.args.deepspeed", str(file))
    assert "No such file" in missing.message
    file.write_text('{"zero_optimization": {"stage": 7}}')
    assert str(refused(spec_file).field).startswith("train.args.deepspeed")
    file.write_text('{"zero_optimization": {"stage": 2}}')
    assert load_spec(spec_file).train.args["deepspeed"] == str(file)


def test_an_override_is_a_yaml_scalar_or_json(spec_file: Path) -> None:
    texts = {"1e-3": 1e-3, "5": 5, "true": True, "no": "no", "null": None, "": None, "#fff": "#fff", "a: b": "a: b"}
    texts |= {'"5"': "5", "[1, 2e-1, x]": [1, 0.2, "x"], '{"a": {"b": 1}}': {"a": {"b": 1}}, "2026-01-01": "2026-01-01"}
    for text, value in texts.items():
        found = load_spec(spec_file, [f"train.model.x={text}"]).train.model
        assert (found, type(found["x"])) == ({"x": value}, type(value)), text


def test_the_file_follows_yaml_1_2(spec_file: Path) -> None:
    text = spec_file.read_text().replace(
        "    seed: 1\n", "    seed: 1\n    eval_strategy: no\n    weight_decay: 1e-2\n"
    )
    spec_file.write_text(f"{text}root: .\n")
    spec = load_spec(spec_file)
    assert (spec.train.args["eval_strategy"], spec.train.args["weight_decay"]) == ("no", 0.01)
    # An override reaches into a launcher given by name.
    spec_file.write_text("name: toy\nrecipe: recipe.py\ntrain:\n  launch: process\n")
    launch = load_spec(spec_file, ["train.launch.threads=2"]).train.launch
    assert (launch.kind, launch.threads) == ("process", 2)


def test_json_specs_are_read(spec_file: Path) -> None:
    path = spec_file.with_suffix(".json")
    path.write_text(json.dumps({"name": "toy", "recipe": "recipe.py", "train": {"launch": "in_process"}}))
    assert load_spec(path).train.launch.kind == "in_process"
    path.write_text('{"name": "toy", "name": "other"}')
    assert "twice" in refused(path).message
    path.write_text('{"name": }')
    assert "line 1" in str(refused(path))


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("train.args.lerning_rate=1", "train.args.lerning_rate", "learning_rate"),
        ("tran.args.seed=1", "tran", "'train'"),
        ("train.modle={}", "train.modle", "'model'"),
        ("train.launch.proceses=2", "train.launch.proceses", "'processes'"),
        ("train.launch.processes=9999", "train.launch.processes", "at most"),
        ("evaluate.launch.processes=9999", "evaluate.launch.processes", "at most"),
        ("train.args.output_dir=x", "train.args.output_dir", "remove it"),
        ("train.args.eval_strategy=epoch", "train.eval_split", "validation"),
        ("predict.recipe=nowhere.py", "predict.recipe", "no such file"),
        ("prepare.sources=[nowhere.csv]", "prepare.sources", "does not exist"),
        ("prepare.sources=[hf://datasets/x]", "prepare.sources", "names no repository"),
        ("prepare.sources=[package:nunpy]", "prepare.sources", "numpy"),
        ("storage=s4://bucket/x", "storage", "scheme"),
        ("storage=memory://x", "storage", "in_process"),
        ("publish.to=s4://bucket/x", "publish.to", "scheme"),
        ("name.x=1", "name.x", "one value"),
        ("no-equals-sign", "no-equals-sign", "key=value"),
        ("train..args=1", "train..args", "key=value"),
        ("train.args.fsdp_config=nowhere.json", "train.args.fsdp_config", "No such file"),
        ("train.args.accelerator_config=nowhere.yaml", "train.args.accelerator_config", "No such file"),
        ("train.args.deepspeed=~no-such-user/zero.json", "train.args.deepspeed", "No such file"),
        ("train.model=[1,", "train.model", "This is not a value"),
        ("evaluate={enabled: false, require: {test_error: '< 100'}}", "evaluate.enabled", "push-to-hub waits"),
        ("evaluate.require.accuracy=> 0.5", "evaluate.require.accuracy", "test_"),
        ("evaluate.require.tets_error=> 0.5", "evaluate.require.tets_error", "test_error"),
        *((f"publish.to={address}", "publish.to", address) for address in ADDRESSES),
    ],
)
def test_what_is_wrong_names_field_value_and_remedy(spec_file: Path, override: str, field: str, words: str) -> None:
    error = refused(spec_file, override)
    assert (error.field, error.exit_code) == (field, 2)
    assert words in str(error)
    assert error.remedy


def test_adapters_are_merged_where_a_recipe_by_name_trains_some(spec_file: Path) -> None:
    named = ("recipe=text-classification", "publish.merge_adapters=true")
    error = refused(spec_file, *named)
    assert (error.field, error.value) == ("publish.merge_adapters", "true")
    assert "train.model.adapter" in str(error.remedy)
    load_spec(spec_file, (*named, "train.model.adapter={rank: 2}"))
    load_spec(spec_file, (*named, "publish.enabled=false"))
    load_spec(spec_file, named[1:])  # of a recipe of the user's the trained model tells


def test_the_line_in_the_file_is_named_and_every_wrong_key_at_once(spec_file: Path) -> None:
    lines = spec_file.read_text().splitlines()
    lines.insert(5, "  shard_row: 5")
    spec_file.write_text("\n".join(lines))
    error = refused(spec_file, "tracking.uri=[1]")
    assert error.field == "prepare.shard_row"
    assert f"{spec_file}, line {lines.index('  shard_row: 5') + 1}" in str(error)
    assert "'shard_rows'" in str(error) and "tracking.uri" in str(error)


def test_a_missing_key_and_a_missing_file_are_said(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    assert "no such file" in refused(path).message
    path.write_text("name: x\n")
    error = refused(path)
    assert (error.field, error.message.startswith("This key is required")) == ("recipe", True)
    assert "folder" in refused(tmp_path).message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name: [", "YAML"),
        (b"name: a\nname: b\n", "twice"),
        (b"- a\n", "mapping"),
        (b"name: \xff\n", "UTF-8"),
        (b"a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n", ""),
        (b"x: " + b"[" * 1000, ""),
        (b"x: &x [*x]\n", ""),
        (b"!!python/object/apply:os.system ['true']\n", ""),
        (b"x" * (2 << 20), "larger than"),
        ("\n".join(LEVELS).encode(), "aliases"),
    ],
)
def test_a_malformed_file_is_refused_without_a_traceback(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_bytes(content)
    assert words in str(refused(path))


@pytest.mark.parametrize(
    ("override", "variable"),
    [
        ("train.args.hub_token=hf_abc", "HF_TOKEN"),
        ("publish.token=abc", "HF_TOKEN"),
        ("prepare.options.aws_secret_access_key=abc", "AWS_SECRET_ACCESS_KEY"),
        ("prepare.options.db_password=abc", "DB_PASSWORD"),
        ("train.model.name=hf_" + "a" * 34, "HF_TOKEN"),
        ("train.launch.env={WANDB_API_KEY: abc}", "WANDB_API_KEY"),
        ("train.launch.env={MY_TOKEN: abc}", "MY_TOKEN"),
        ("train.launch.env={PGPASSWORD: abc}", "PGPASSWORD"),
        ("prepare.options.note=glpat-" + "a1B2" * 6, "that its client reads"),
        ("prepare.options.dsn='host=db password=hunter22'", "that its client reads"),
        ("tracking.uri=http://me:pass123@host/", ""),
        ("prepare.options.note=read http://me:pass123@host/ first", ""),
    ],
)
def test_a_secret_is_refused_without_being_repeated(spec_file: Path, override: str, variable: str) -> None:
    error = refused(spec_file, override)
    secret = "pass123" if not variable else override.rpartition("=")[2].rpartition(": ")[2].rstrip("}")
    assert variable in str(error)
    assert secret not in str(error)


def test_words_that_only_look_like_secrets_are_accepted(spec_file: Path) -> None:
    spec = load_spec(spec_file, ["train.model.pad_token=<pad>", "train.model.num_tokens=5", "train.model.secret=null"])
    assert spec.train.model["pad_token"] == "<pad>"


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("def prepare(options, out): ...\n", "build_model"),
        ("def build_model(options, data): ...\n", "prepare"),
        ("def prepare(:\n", "line 1"),
        ("x = 'a\0b'\n", "not valid Python"),
        ("from mine import prepare, build_model\n", None),
        ("from mine import *\n", None),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_before_it_is_run(spec_file: Path, recipe: str, words: str | None) -> None:
    (spec_file.parent / "mine.py").write_text("def prepare(o, d): ...\ndef build_model(o, d): ...\n")
    (spec_file.parent / "recipe.py").write_text(recipe)
    if words is None:
        load_spec(spec_file)
    else:
        error = refused(spec_file)
        assert error.field == "recipe" and words in str(error)


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("train.train_split=trian", "train.train_split", "Did you mean 'train'?"),
        ("train.eval_split=validation", "train.eval_split", "Prepared were: train, test."),
        ("evaluate.splits=[test, tset]", "evaluate.splits", "Did you mean 'test'?"),
        ("predict.split=tset", "predict.split", "Did you mean 'test'?"),
    ],
)
def test_a_split_that_was_not_prepared_is_named(spec_file: Path, override: str, field: str, words: str) -> None:
    prepared = {"train": PreparedSplit(rows=1), "test": PreparedSplit(rows=1)}
    with pytest.raises(ConfigError) as caught:
        check_splits(load_spec(spec_file, [override]), prepared)
    assert caught.value.field == field
    assert words in str(caught.value)
    off = ["evaluate.enabled=false", "predict.enabled=false"]
    if not field.startswith("train"):
        check_splits(load_spec(spec_file, [override, *off]), prepared)


def test_what_a_stages_own_file_lacks_is_looked_for_in_the_pipelines_recipe(spec_file: Path) -> None:
    data, model = spec_file.parent / "data.py", spec_file.parent / "model.py"
    data.write_text("def prepare(options, out): ...\n")
    model.write_text("def build_model(options, data): ...\n")
    load_spec(spec_file, [f"prepare.recipe={data}"])
    load_spec(spec_file, [f"predict.recipe={data}"])
    others = [f"{section}.recipe={model}" for section in ("train", "evaluate")]
    error = refused(spec_file, f"recipe={data}", *others, f"predict.recipe={spec_file.parent / 'data.py'}")
    assert (error.field, "build_model" in str(error)) == ("predict.recipe", True)


@pytest.mark.parametrize(
    ("overrides", "args"),
    [
        (["train.stop_early={}"], {"eval_strategy": "epoch", "save_strategy": "epoch", "greater_is_better": False}),
        (["train.stop_early.metric=f1"], {"metric_for_best_model": "f1", "greater_is_better": True}),
        (["train.stop_early.metric=test_rmse"], {"greater_is_better": False, "load_best_model_at_end": True}),
        (["train.stop_early={metric: f1, greater_is_better: false}"], {"greater_is_better": False}),
        (
            ["train.stop_early={}", "train.args={eval_strategy: steps, eval_steps: 50, save_total_limit: 5}"],
            {"save_strategy": "steps", "save_steps": 50, "save_total_limit": 5},
        ),
        (["train.stop_early={}", "train.args={save_strategy: steps, save_steps: 7}"], {"eval_steps": 7}),
    ],
)
def test_early_stopping_brings_the_arguments_that_it_needs(
    spec_file: Path, overrides: list[str], args: dict[str, Any]
) -> None:
    spec = load_spec(spec_file, [*overrides, "train.args.use_cpu=true"])
    assert {name: spec.train.args.get(name) for name in args} == args
    assert spec.train.eval_split == "validation"
    assert parse_spec(spec.to_record()) == spec  # filled in once


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (["train.stop_early.patience=0"], "train.stop_early.patience", "1"),
        (["train.stop_early.metrik=f1"], "train.stop_early.metrik", "Did you mean 'metric'?"),
        (["train.stop_early={}", "train.args.eval_strategy=no"], "train", "set train.args.eval_strategy to steps"),
        (["train.stop_early={}", "train.args.metric_for_best_model=f1"], "train", "names another metric (f1)"),
    ],
)
def test_early_stopping_that_cannot_be_is_refused(
    spec_file: Path, overrides: list[str], field: str, words: str
) -> None:
    error = refused(spec_file, *overrides)
    assert (error.field, words in str(error)) == (field, True)


def test_evaluate_and_predict_take_from_train_what_they_leave_unset(spec_file: Path) -> None:
    spec = load_spec(spec_file, ["train.args.bf16=true", "predict.args.bf16=false", "predict.launch=in_process"])
    evaluate, predict = spec.evaluate_config(), spec.predict_config()
    assert (evaluate.args["bf16"], evaluate.launch) == (True, spec.train.launch)
    assert predict.args["bf16"] is False
    assert predict.launch is not None and predict.launch.kind == "in_process"


def test_a_spec_that_prefect_would_refuse_is_refused_at_once(spec_file: Path) -> None:
    large = f"prepare.options={json.dumps({'words': 'word ' * 90_000})}"
    with pytest.raises(ConfigError, match=r"The spec has 45\d,\d{3} bytes.*at most 400,000") as refused:
        load_spec(spec_file, [large])
    assert "patterns" in str(refused.value.remedy)


def test_every_field_is_described_for_the_form() -> None:
    schema = PipelineSpec.model_json_schema()
    for model in (schema, *schema["$defs"].values()):
        for name, field in model["properties"].items():
            assert field.get("description"), f"{model['title']}.{name}"
        assert model["additionalProperties"] is False


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conda.yaml").write_text("name: toy\ndependencies: []\n")
    Path("data.json").write_text("[1, 2]")


def test_the_only_spec_of_the_folder_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"(?s)has none.*trainflow init NAME"):
        choose_spec_file(None, ["a=1"])
    # Data of many bytes is not read as a spec.
    Path("rows.json").write_text('{"name": "rows", "recipe": "x", "rows": "' + "x" * 1_000_000 + '"}')
    Path("digits.yml").write_text(SPEC)
    assert choose_spec_file(None, None) == (Path("digits.yml"), [])
    Path("other.yaml").write_text(SPEC)
    with pytest.raises(ConfigError, match=r"several: digits\.yml, other\.yaml"):
        choose_spec_file(None, None)
    Path("pipeline.yaml").write_text(SPEC)
    assert choose_spec_file(None, None) == (Path("pipeline.yaml"), [])


def test_the_first_word_is_a_spec_or_an_override() -> None:
    Path("pipeline.yaml").write_text(SPEC)
    assert choose_spec_file(Path("other.yaml"), ["a=1"]) == (Path("other.yaml"), ["a=1"])
    assert choose_spec_file(Path("absent"), None) == (Path("absent"), [])
    assert choose_spec_file(Path("train.args.seed=1"), ["a=2"]) == (Path("pipeline.yaml"), ["train.args.seed=1", "a=2"])
    Path("lr=1.yaml").write_text(SPEC)
    assert choose_spec_file(Path("lr=1.yaml"), None) == (Path("lr=1.yaml"), [])


def test_commands_that_read_runs_mean_the_spec_that_makes_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*words: str, storage: str | None = None) -> str:
        return Path(PlaceWords([*words], storage).choose("runs").storage).name

    with pytest.raises(ConfigError, match="neither a single spec nor"):
        choose()
    Path(".trainflow").mkdir()
    assert choose() == ".trainflow"
    with pytest.raises(ConfigError, match="is empty"):
        choose(storage="")
    with pytest.raises(ConfigError, match="has none"):
        choose("a=1")
    monkeypatch.chdir(path.parent)
    Path(".trainflow").mkdir()  # of another spec, perhaps
    assert [choose(), choose("storage=s"), choose(storage=".")] == ["store", "s", "project"]
    for word in ("pipeline.yaml", "a=1"):
        with pytest.raises(ConfigError, match="not both"):
            choose(word, storage=".")


def test_a_storage_that_is_named_has_to_be_there(path: Path) -> None:
    Path("store").mkdir()
    assert PlaceWords(None, "store").choose("runs").storage == str(Path("store").absolute())
    with pytest.raises(ConfigError, match="no such folder") as caught:
        PlaceWords(None, "stroe").choose("runs")
    error = caught.value
    assert (error.field, error.value, error.remedy) == ("--storage", "stroe", 'Did you mean "store"?')
    given: Any = ((None, "elsewhere/far"), (None, "data.json"), ([str(path), "other.yaml"], None))
    for words, says in zip(given, ("no such folder.*that a run used", "a file, not", "yaml: Give one"), strict=True):
        with pytest.raises(ConfigError, match=says):
            PlaceWords(*words).choose("runs")
    # That of a spec may be one of runs to come.
    assert PlaceWords([str(path)], None).choose("runs").storage == str(path.parent / "store")
    assert not (path.parent / "store").exists()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def limited(path: Path, *overrides: str) -> PipelineSpec:
    return load_spec(path, ("limit=5", *overrides))


def test_a_check_has_a_storage_an_experiment_and_a_hub_of_its_own(path: Path) -> None:
    spec = limited(path, "publish.to=hf://acme/model", "publish.revision=dev", "tracking.tags.team=a")
    assert spec.storage == f"{load_spec(path).storage}/limited"
    assert limited(path, f"storage={spec.storage}").storage == spec.storage, "it is named once"
    assert (spec.publish.to, spec.publish.revision, spec.publish.enabled) == (None, None, True)
    assert spec.tracking.experiment == "toy-limited"
    assert limited(path, 'evaluate.require={"test_error": "< 0.1"}').evaluate.require == {}
    assert spec.tracking.tags == {"team": "a", "trainflow.limit": "5"}
    for value, words in (("0", "at least 1"), ("many", "whole number"), ("2.5", "whole number")):
        with pytest.raises(ConfigError, match=rf"^limit.*{words}"):
            load_spec(path, (f"limit={value}",))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, {"eval_strategy": "steps", "eval_steps": 2}),
        ({"save_strategy": "no"}, {"save_strategy": "no"}),
        ({"max_steps": 3}, {"max_steps": 3}),
        ({"max_steps": 500, "warmup_steps": 40}, {"max_steps": 4, "warmup_steps": 1}),
        ({"max_steps": -1, "num_train_epochs": 3, "warmup_steps": 0.1}, {"max_steps": 4, "warmup_steps": 0.1}),
        ({"dataloader_drop_last": True}, {"dataloader_drop_last": False}),
        ({"eval_strategy": "steps", "eval_delay": 100}, {"eval_delay": 0, "eval_steps": 2}),
        ({"logging_strategy": "epoch"}, {"logging_strategy": "steps", "logging_steps": 1}),
    ],
)
def test_a_check_trains_a_few_steps_and_evaluates_and_saves_in_them(
    path: Path, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    spec = limited(path, "train.eval_split=test", *(f"train.args.{name}={value}" for name, value in given.items()))
    assert {name: spec.train.args.get(name) for name in expected} == expected


def test_the_keys_of_a_check_are_never_those_of_a_run(path: Path) -> None:
    # The same settings and the same folder: what is left is the limit itself.
    real = load_spec(path, ("train.args.max_steps=4", "train.args.save_steps=2", "train.args.logging_steps=1"))
    check = load_spec(path, ("limit=1000",)).model_copy(update={"storage": real.storage, "tracking": real.tracking})
    assert check.train == real.train
    keys, others = Plan.of(real).early_keys, Plan.of(check).early_keys
    assert all(key.fields["limit"] is None for key in keys.values())
    for name, key in others.items():
        assert key.fields == {**keys[name].fields, "limit": 1000}
    assert Plan.of(real).pipeline_key != Plan.of(check).pipeline_key
