"""A new project is valid as it is written; editors and shells know the keys of a spec."""

from __future__ import annotations

import importlib
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT
from tests.support.toy import SPEC
from trainer_lib.base.yaml_text import parse_yaml
from trainer_lib.errors import ConfigError, TrainflowError
from trainer_lib.protocol.recipe_names import ABOUT
from trainer_lib.recipes import PrepareOutput, load
from trainer_lib.storage import Store
from trainflow.flows.cli.options import complete_override, complete_recipe
from trainflow.flows.new_project import starting
from trainflow.flows.spec.schema import argument_schemas, spec_schema
from trainflow.flows.spec.spec import load_spec


@pytest.fixture(scope="module")
def validator() -> Any:
    library = importlib.import_module("jsonschema")
    library.Draft202012Validator.check_schema(spec_schema())
    return library.Draft202012Validator(spec_schema())


@pytest.mark.parametrize("recipe", sorted(ABOUT))
def test_a_new_project_passes_its_own_tests_and_its_schema(tmp_path: Path, recipe: str, validator: Any) -> None:
    folder = tmp_path / "my-project"
    files = starting.write_project(folder, recipe)
    assert sorted(files) == sorted(folder.iterdir())
    assert load_spec(folder / "pipeline.yaml").name == "my-project"
    text = (folder / "pipeline.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert list(validator.iter_errors(parse_yaml(text))) == []
    # 200 rows have splits of each kind. Some tags and classes are rare.
    cut = () if recipe in ("text-classification", "token-classification") else ("*.jsonl", "lines.csv")
    for data in (path for names in cut for path in folder.glob(names)):
        data.write_text("".join(data.read_text().splitlines(keepends=True)[:200]))
    tests = runpy.run_path(str(folder / "test_my_project.py"))
    tests["test_the_spec_is_valid"]()
    tests["test_every_split_has_rows"](tmp_path / "prepared")
    assert "{{" not in "".join(file.read_text() for file in files if file.is_file())


def test_every_named_recipe_can_begin_a_project_and_the_examples_have_its_data() -> None:
    assert set(starting.templates()) == set(ABOUT)
    for name in ("tabular/wine", "tabular/diabetes", "forecasting/elnino"):
        assert (ROOT / "examples" / f"{name}.csv").read_text() == starting.read_sample(f"{Path(name).name}.csv")


def test_a_folder_that_is_not_empty_and_bad_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    starting.write_project(tmp_path / "empty", "tabular-regression")
    for folder, recipe, says in (
        (tmp_path, "tabular-regression", "not empty"),
        (tmp_path / "note.txt", "tabular-regression", "This is a file"),
        (tmp_path / "a b", "tabular-regression", "cannot have this name"),
        (tmp_path / "fine", "tabular-regresion", "No recipe has this name"),
    ):
        with pytest.raises(ConfigError, match=says):
            starting.write_project(folder, recipe)
    assert not (tmp_path / "fine").exists()


def test_the_schema_takes_every_example(validator: Any) -> None:
    specs = sorted((ROOT / "examples").glob("*/*.yaml"))
    assert len(specs) > 10
    assert {path: found for path in specs if (found := [*validator.iter_errors(parse_yaml(path.read_text()))])} == {}


@pytest.mark.parametrize(
    ("edit", "places"),
    [
        ({}, []),
        ({"trian": {}}, [""]),
        ({"train": {"args": {"learning_rat": 1}}}, ["train.args"]),
        ({"train": {"args": {"learning_rate": "fast"}}}, ["train.args"]),
        ({"train": {"args": {"output_dir": "x"}}}, ["train.args"]),
        ({"train": {"args": {"save_strategy": "sometimes"}}}, ["train.args"]),
        ({"train": {"launch": "torchrum"}}, ["train.launch"]),
        ({"evaluate": {"splits": []}}, ["evaluate.splits"]),
        ({"limit": 0}, ["limit"]),
        # What validators read besides the type.
        ({"refresh": {"prepare": "1d", "train": 60}}, []),
        ({"evaluate": {"require": {"test_error": {"max": 1}}}}, []),
        ({"train": {"launch": "torchrun", "preemption": {"command": "look --now"}}}, []),
    ],
)
def test_the_schema_refuses_what_the_spec_refuses(edit: dict[str, Any], places: list[str], validator: Any) -> None:
    errors = list(validator.iter_errors({**parse_yaml(SPEC), **edit}))
    assert [".".join(map(str, error.absolute_path)) for error in errors] == places


def test_the_shell_completes_keys_arguments_and_values() -> None:
    def words(text: str) -> list[str]:
        return [word for word, _ in complete_override(text)]

    assert "train.eval_split=" in words("train.")
    assert "train.launch.processes=" in words("train.launch.")
    assert not any(".args." in word for word in words("train.e")), "a hundred arguments would hide the keys"
    assert words("train.args.learning") == ["train.args.learning_rate="]
    assert {"train.args.seed=", "train.args.max_steps="} <= set(words("train.args."))
    assert set(words("train.args.save_strategy=")) >= {"train.args.save_strategy=no", "train.args.save_strategy=steps"}
    assert words("publish.enabled=t") == ["publish.enabled=true"]
    assert complete_recipe("tabular-c") == ["tabular-classification"]
    # Every argument has a description, and no secret is offered.
    found = argument_schemas()
    assert len(found) > 100
    assert [name for name, schema in found.items() if not schema["description"]] == []
    assert not {"hub_token", "output_dir"} & set(found)
    assert found["warmup_steps"]["description"].count("steps")


def test_the_command_completes_by_typer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from trainflow.flows.cli.main import main

    monkeypatch.setenv("_TRAINFLOW_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "trainflow run pipeline.yaml train.args.warmup_st")
    with pytest.raises(SystemExit):
        main([])
    assert "train.args.warmup_steps=" in capsys.readouterr().out


def _customers(rows: int) -> str:
    """A table as a shop might export it, with a leak, an id, gaps in several forms, and rows twice."""
    lines = ["Customer ID;Signup;Spent;Share;City;Comment;Score;Cancelled on;Churned"]
    for row in range(rows):
        churned = row % 3 == 0
        spent = "unknown" if row % 17 == 5 else f"{row % 7 + (8 if churned else 1)} {row % 900:03},50 €"
        city = ("Köln", "köln ", "Bonn")[row % 3 if row % 5 else 2]
        comment = f"was {'not ' * churned}happy with order number {row}"
        lines.append(
            f"C{row:04}-X;{row % 28 + 1:02}.0{row % 9 + 1}.2023;{spent};{row % 80} %;{city};{comment};"
            f"{'' if row % 11 == 3 else row % 5};{'yes' if churned else 'no'};{'Yes' if churned else 'No'}"
        )
    return "\n".join([*lines, lines[7], ""])


def test_a_spec_for_a_table_has_guesses_with_reasons_that_prepare_can_use(tmp_path: Path, validator: Any) -> None:
    data = tmp_path / "customers.csv"
    data.write_bytes(_customers(120).replace("\n", "\r\n").encode("cp1252"))
    folder = tmp_path / "churn"
    assert sorted(starting.write_project_for(folder, str(data), None)) == sorted(folder.iterdir())
    text = (folder / "pipeline.yaml").read_text()
    assert list(validator.iter_errors(parse_yaml(text))) == []
    spec = load_spec(folder / "pipeline.yaml")
    assert (spec.name, spec.prepare.sources) == ("churn", [str(data)])
    options = dict(spec.prepare.options)
    for words in (
        "encoding cp1252 and the separator ';'",
        "'unknown': read as no value",
        "LEAK? Cancelled on alone predicts 100% of the label",
        "split: {by: time, column: Signup}",
        "1 row in 121 are there before",
        "label: Churned  # guess: its name",
    ):
        assert words in text
    assert {key: options[key] for key in ("label", "missing", "merge", "hashed", "dates")} == {
        "label": "Churned",
        "missing": "mean",
        "merge": ["City"],
        "hashed": {"Comment": 64},
        "dates": {"Signup": None},
    }
    assert options["read"] == {"na_values": ["unknown"]}
    out = PrepareOutput(Store.open(tmp_path / "out"), [str(data)])
    assert spec.root is not None
    assert sum(len(list(rows)) for rows in load(spec.recipe, spec.root).prepare(options, out).values()) == 121


@pytest.mark.parametrize(
    ("content", "label", "recipe", "words"),
    [
        ("text,labels\n" + "".join(f"row {row},{'a;' * (row % 2)}{'b' * (row % 3 == 0)}\n" for row in range(60)), None,
         "tabular-classification", "hashed: {text: 64}"),
        ("x,size\n" + "".join(f"{row},{row * 1.5}\n" for row in range(50)), None, "tabular-regression", "last column"),
        ('a,"n"\n' + "".join(f'{row % 2},"{row},000"\n' for row in range(1, 50)), "a",
         "tabular-classification", "thousands"),
        ("d,label\n" + "".join(f"0{row % 9 + 1}/0{row % 7 + 1}/2024,{row % 2}\n" for row in range(50)), None,
         "tabular-classification", "can be read in 2 ways"),
        ('size,asked,price\n' + "".join(f'"{row},000",{row * 7}.5 €,{row * 7}.5\n' for row in range(1, 50)), None,
         "tabular-regression", "LEAK? asked alone predicts 100% of the label"),
        ("zip,label\n" + "".join(f"0{row % 9}111,{row % 2}\n" for row in range(50)), None,
         "tabular-classification", "categorical: [zip]  # zeros in front: names"),
        ('{"x": 1, "n": 2, "label": "a"}\n{"n": 3, "label": "b"}\n' * 30, None,
         "tabular-classification", "Rows lack columns, which prepare-data refuses"),
        ("y,no\n" + "".join(f"{row % 2},{row}\n" for row in range(50)), "no", "tabular-regression", 'label: "no"'),
        *(("when,path,failed\n" + "".join(
            f"2024-03-{1 + row % 28:02}T{row % 24:02}:00:00{('+00:00', '+05:30', '-08:00')[row % 3]},/{row % 4},"
            f"{('true', 'false')[row % 5 > 0]}\n" for row in range(90)
        ), None, "tabular-classification", words) for words in (
            "dates: {when: null}", "split: {by: time, column: when}")),
        *((",x,y,label\n" + "".join(
            f"{row},{row % 5},{'' if row % 8 == 1 else f'{row % 3}.0'},{'ab'[row % 2]}\n" for row in range(90)
        ), None, "tabular-classification", words) for words in ('ignore: [""]', "missing: mean")),
        (json.dumps([{"text": f"It is {row}", "stars": row % 2, "by": {"name": "x"}} for row in range(90)], indent=2),
         "stars", "tabular-classification", "Column by has lists or objects"),
        (json.dumps([{"id": row, "conversations": [{"from": "human", "value": "hi"}]} for row in range(9)]), None,
         "supervised-fine-tuning  # one of trainflow's own; a file of yours is recipe.py", 'sources: ["../data.json"]'),
        ('{"chosen": "a b", "rejected": "b"}\n' * 9, None, "preference-optimization  # one of trainflow's own; a file "
         "of yours is recipe.py", "description: Learned from data.jsonl."),
        ('{"tokens": ["a"], "ner_tags": ["O"]}\n' * 9, None, "token-classification  # one of trainflow's own; a file "
         "of yours is recipe.py", "    words: tokens\n    label: ner_tags\n"),
        ("created,id,kind,text\n" + "".join(f"2024-01-{1 + row % 28},{row},{'ab'[row % 2]},a b c {row}\n"
         for row in range(90)), None, "tabular-classification", "label: kind  # guess: the last column"),
        ("x,a,b,c\n" + "".join(f"{row},{row % 2},{row // 3 % 2},{row // 5 % 2}\n" for row in range(60)), None,
         "tabular-classification", "Columns a, b, c have 0 and 1. If several are labels, write label: [A, B]"),
        ("SalePrice,x\n" + "".join(f"{row % 5}.{row:02},{row}\n" for row in range(12)), None,
         "tabular-regression", "label: SalePrice  # guess: its name; 12 different numbers: amounts"),
        ("x,c\n" + "".join(f"{row % 7},{'' if row % 9 else 'about '}{row % 50 + 60}\n" for row in range(300)), None,
         "tabular-regression", "The label has numbers among texts such as 'about 60', 'about 69', 'about 78': mend"),
        ("label,sales,shop\n" + "".join(f'x,"{row % 4},{row % 9}00",{row % 3}\n' for row in range(90)), None,
         "tabular-regression", "label: sales  # guess: its name; 36 different numbers: amounts"),
    ],
)  # fmt: skip
def test_the_recipe_and_what_looks_wrong_are_guessed_from_the_rows(
    tmp_path: Path, content: str, label: str | None, recipe: str, words: str
) -> None:
    path = tmp_path / {"{": "data.jsonl", "[": "data.json"}.get(content[0], "data.csv")
    path.write_text(content)
    starting.write_project_for(tmp_path / "new", str(path), label)
    text = (tmp_path / "new" / "pipeline.yaml").read_text()
    assert f"recipe: {recipe}\n" in text
    assert words in text


@pytest.mark.parametrize(
    ("file", "content", "label", "words"),
    [
        ("data.csv", "x,label\n", None, "no rows"),
        ("data.csv", "x,label\n1,a\n", "labels", 'Did you mean "label"'),
        ("coco.json", '{"images": [{"id": 1}], "categories": [{"id": 1}]}', None,
         "No column has numbers or texts: 'images', 'categories'"),
        ("data.csv", None, None, "no such file"),
        ("doccano.jsonl", '{"text": "Anna", "label": [[0, 4, "PER"]]}\n' * 2, None, "'label' has the name of a label"),
        ("log.csv", "when,id\n" + "".join(f"2024-01-{day:02},{day}\n" for day in range(1, 29)), None,
         "No column looks like a label"),
    ],
)  # fmt: skip
def test_files_in_which_no_label_is_found_are_refused(
    tmp_path: Path, file: str, content: str | None, label: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(TrainflowError, match=words):
        starting.write_project_for(tmp_path / "new", str(tmp_path / file), label)
    assert not (tmp_path / "new").exists()
