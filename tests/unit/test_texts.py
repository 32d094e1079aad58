"""JSON, YAML, requests and text of strangers: what goes in comes out, what does not belong there is refused by name."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from ruamel.yaml import YAML

from trainer_lib.base import json_text
from trainer_lib.base.metric_names import read_metrics
from trainer_lib.base.records import to_record
from trainer_lib.base.suggestions import to_cell, to_html, to_markdown, to_terminal
from trainer_lib.base.yaml_text import YamlProblem, dump_yaml, parse_yaml, parse_yaml_scalar, parse_yaml_with_lines
from trainer_lib.data.rows.row_sources import RowFile
from trainer_lib.errors import ConfigError
from trainer_lib.protocol import requests
from trainer_lib.storage import FileEntry
from trainflow.flows.cli.terminal import _SafeConsole, stage_sentence

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (DEEP, "nested more than 100 levels"),
        ("[" * 100_000, "nested more than 100 levels"),
        ('{"a":' * 100_000, "nested more than 100 levels"),
        ("[" * (json_text.MAX_DEPTH + 1) + "]" * (json_text.MAX_DEPTH + 1), "nested more than 100 levels"),
        ("[" * (json_text.MAX_CONTAINERS + 1), "more than 4,000,000 lists and objects"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ('{"a": 1', "Expecting ',' delimiter"),
        ("[1]", "it is not an object"),
        ("9" * 5000, "Exceeds the limit"),
    ],
)
@pytest.mark.parametrize("as_bytes", [True, False])
def test_what_is_wrong_is_a_value_error_that_says_it(text: str, problem: str, as_bytes: bool) -> None:
    with pytest.raises(ValueError, match=problem):
        json_text.parse_json(text.encode() if as_bytes else text, dict, unique=True)


@pytest.mark.parametrize("data", [b"", None, b"\xff", b"[1]", b'{"name": "to', DEEP.encode()])
def test_a_record_that_a_crash_has_cut_is_empty(data: bytes | None) -> None:
    assert json_text.parse_record(data) == {}


def test_brackets_in_texts_and_wide_values_are_no_depth(tmp_path: Path) -> None:
    wide = {"text": "[" * 1000, "list": [[], {}] * 1000, "deep": json.loads("[" * 98 + "]" * 98)}
    file = tmp_path / "wide.json"
    file.write_text(json.dumps(wide))
    assert json_text.read_json(file) == json_text.parse_json(file.read_bytes(), dict) == wide


@pytest.mark.parametrize("change", [('"b": 2', '"b": 3'), ("0.25", "0.26"), ("ä", "a"), ('"seal": "', '"seal": "0')])
def test_a_changed_record_does_not_fit_its_seal(change: tuple[str, str]) -> None:
    record = {"a": [0.25, None, True], "b": 2, "c": {"ä": "ü"}, "d": float("inf")}
    text = json_text.render_sealed(record).decode().replace("\\u00e4", "ä")
    assert json_text.parse_sealed(text.encode()) == record
    assert json_text.parse_sealed(json.dumps(json.loads(text), sort_keys=True).encode()) == record, "the form is free"
    assert change[0] in text
    with pytest.raises(ValueError, match="changed after trainflow wrote it"):
        json_text.parse_sealed(text.replace(*change).encode())
    assert json_text.parse_sealed(b'{"a": 1}') == {"a": 1}, "one of an earlier version has no seal"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-1.", -1.0),
        (".inf", float("inf")),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+1", 1),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        *((word, word) for word in ("yes", "no", "on", "off", "y", "N")),
        *((word, word) for word in ("12:30", "2:4", "2026-01-01", "2024_01", "1_000", "=", "nan")),
    ],
)
def test_words_mean_what_the_core_schema_of_yaml_1_2_says(text: str, value: Any) -> None:
    found = parse_yaml(f"key: {text}\n")["key"]
    assert found == value and type(found) is type(value)
    assert parse_yaml_scalar(text) == value


def test_lines_are_counted_through_lists_and_merged_mappings() -> None:
    text = "base: &base\n  x: 1\nlist:\n  - a\n  - b: 2\nmerged:\n  <<: *base\n  y: 3\n"
    data, lines = parse_yaml_with_lines(text)
    assert data["merged"] == {"x": 1, "y": 3}
    assert (lines["base.x"], lines["list.1"], lines["list.1.b"], lines["merged.y"]) == (2, 5, 5, 8)
    assert parse_yaml_with_lines("") == (None, {})
    # A version directive changes no meaning.
    assert parse_yaml("%YAML 1.1\n---\nstrategy: no\nseed: 010\n") == {"strategy": "no", "seed": 10}


@pytest.mark.parametrize(
    ("text", "problem", "line"),
    [
        ("a: 1\nb:\n  c: hf_secret\n  c: hf_other\n", "'b.c' is given twice (lines 3 and 4)", 4),
        ("a: [1\n", "expected ',' or ']'", 2),
        ("a: b: c\n", "mapping values are not allowed here", 1),
        ("a:\n\t- 1\n", "cannot start any token", 2),
        ("a: *b\n", "undefined alias 'b'", 1),
        ("--- 1\n--- 2\n", "expected a single document in the stream but found another document", 2),
        ("!!python/object/apply:os.system ['true']\n", "could not determine a constructor", 1),
        ("a: !!int many\n", "a value does not fit its tag", None),
        ("a: &a [*a]\n", "nested too deeply", None),
        ("[" * 1000, "nested too deeply", None),
        ("- " * 101 + "1", "nested too deeply", None),
        ("{a: " * 101 + "1" + "}" * 101, "nested too deeply", None),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_without_values(text: str, problem: str, line: int | None) -> None:
    with pytest.raises(YamlProblem) as caught:
        parse_yaml(text)
    assert problem in caught.value.problem
    assert caught.value.line == line
    assert "secret" not in str(caught.value) and "other" not in str(caught.value).replace("another", "")


def test_every_reader_understands_what_is_written() -> None:
    texts = ["1e-3", "0o7", "010", "1_000", "12:30", "2026-01-01", "null", "", "# x", "é: x", "a\nb\n", "="]
    data = {
        "language": "no",
        "on": ["yes", "off", "y"],
        "texts": texts,
        "numbers": [1e-05, 1e20, 0.1, 3, -0.0, float("inf")],
        "nested": {"empty": {}, "none": None, "flags": [True, False]},
    }
    text = dump_yaml(data)
    assert parse_yaml(text) == data
    assert list(parse_yaml(text)) == list(data)
    for version in ("1.1", "1.2"):
        reader = YAML(typ="safe", pure=True)
        reader.version = version
        assert reader.load(text) == data


def test_a_long_text_stays_on_the_line_of_its_key_and_what_occurs_twice_is_written_twice() -> None:
    data = {"stages": {"prepare-data": "8" * 64}, "text": "word " * 60 + "end"}
    text = dump_yaml(data)
    assert len(text.splitlines()) == 3
    assert f"  prepare-data: '{'8' * 64}'" in text or f"  prepare-data: {'8' * 64}" in text
    assert parse_yaml(text) == data
    shared = [1]
    assert dump_yaml({"a": shared, "b": shared}) == "a:\n- 1\nb:\n- 1\n"


FILES = (FileEntry("data/train/00000.arrow", 3, "a" * 64),)
DATA = requests.PreparedData(
    "store", {"train": requests.PreparedSplit(2, ("data/train/00000.arrow",), {"x": "int64"})}, {"n": 1}, FILES
)
RECIPE = requests.RecipeFile("/p/recipe.py", "/p")
METRICS: list[Any] = ["accuracy", {"name": "sklearn.metrics:fbeta_score", "beta": 2, "as": "f2"}]
REQUESTS: list[requests.Request[Any]] = [
    requests.PrepareRequest(output="o", recipe=RECIPE, options={"a": [1]}, shard_rows=3, allow_nan=True),
    requests.TrainRequest(
        output="o",
        recipe=RECIPE,
        tracking=True,
        data=DATA,
        args={"use_cpu": True},
        proof=requests.Proof(3, kill=True),
        stop_early=requests.StopEarly(3, 0.5),
        preemption=requests.Preemption(command=("check", "it"), headers={"a": "b"}, every_s=1.0),
    ),
    requests.EstimateRequest(output="o", recipe=RECIPE, data=DATA, eval_split="test", processes=4),
    requests.ProbeRequest(output="o", recipe=RECIPE, data=DATA, args={"max_steps": 9}, rows=7),
    requests.EvaluateRequest(
        output="o", recipe=RECIPE, data=DATA, model_url="m", splits=("train", "test"), metrics=read_metrics(METRICS)
    ),
    requests.EvaluateCheckpointRequest(output="o", recipe=RECIPE, data=DATA, checkpoint="c", eval_split="test"),
    requests.PredictRequest(
        output="o", recipe=RECIPE, data=DATA, model_url="m", split="test", rows_per_file=5, debug=True
    ),
    requests.MergeRequest(output="o", recipe=RECIPE, data=DATA, args={"use_cpu": True}, model_url="m"),
    requests.ScoreRequest(
        output="o", model="m", digest="d", code="c", sources=(RowFile("s3://b", "a.csv", 3),), key="k"
    ),
    requests.MeasureRowsRequest(output="o", model="m", digest="d", code="c", sources=(RowFile("s3://b", "a.csv", 3),)),
    requests.ExportRequest(output="o", model="m", code="c", form="onnx", sources=(RowFile("s3://b", "a.csv", 3),)),
    requests.CompareRequest(output="o", recipe=RECIPE, whole="a", resumed="b"),
    requests.ImportRequest(output="o", recipe=RECIPE, source="s", model="build"),
]


def test_what_is_asked_for_is_what_the_worker_reads() -> None:
    assert [request.verb for request in REQUESTS] == list(requests.Request.by_verb)
    for request in REQUESTS:
        assert requests.read_request(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": 99}, "request.json"),
        ({"verb": "dance"}, "verb"),
        ({"surprise": 1}, "train.surprise"),
        ({"output": None}, "train.output"),
        ({"debug": "yes"}, "train.debug"),
        ({"recipe": {"path": "p"}}, "train.recipe.root"),
        ({"data": {**to_record(DATA), "splits": {"train": {"rows": "many"}}}}, "train.data.splits.train.rows"),
        ({"data": ...}, "train.data"),  # left out
    ],
)
def test_what_does_not_belong_there_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    record = {name: value for name, value in {**REQUESTS[1].to_json(), **change}.items() if value is not ...}
    with pytest.raises(ConfigError) as caught:
        requests.read_request(record)
    assert caught.value.field == field
    assert ("TrainRequest needs this field" in str(caught.value)) == ("data" not in record)


def test_a_result_of_another_version_is_refused() -> None:
    result = requests.TrainResult(3, 24, 2, None, ("checkpoint-3",), 7, files=FILES, metrics={"loss": 0.5})
    assert REQUESTS[1].read_result(json.loads(json.dumps(to_record(result)))) == result
    with pytest.raises(ConfigError) as caught:
        REQUESTS[1].read_result({**to_record(result), "speed": 1})
    assert caught.value.field == "result.json.speed"


HOSTILE = (
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[31m",
    "\x9b31m",
    "a\rb\bc",
    "\u202eevil\u202c",
    "\u200f\u2066x\u2069",
    "\u2028line",
    "\ud800",
    "\x00\x7f",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "![x](https://example.org/pixel.png)",
    "[x](javascript:alert(1))",
    "``` \n# forged",
    "| cell | cell |",
    "</td></tr>",
    "<!-- trainflow:results -->",
    "x" * 10_000,
)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_steers_the_medium(text: str) -> None:
    for shown in (to_terminal(text), to_cell(text), to_markdown(text), to_html(text)):
        assert shown.replace("\n", "").isprintable()
        shown.encode()
    assert "\n" not in to_cell(text) and len(to_cell(text)) <= 1000
    assert "<" not in to_html(text) and "<" not in to_markdown(text)
    html = MarkdownIt("gfm-like", {"linkify": False}).render(f"| head |\n|---|\n| {to_markdown(text)} |\n")
    assert html.count("<td") == 1
    assert not [tag for tag in ("<script", "<img", "<a ", "<h1", "<pre", "<!--") if tag in html]


@pytest.mark.parametrize(
    "text", ["Käufer", "می\u200cخواهم", "👩\u200d🔬", "a\u00a0b", "日本\u3000語", "x\ty\nz", "eval_loss"]
)
def test_words_of_every_language_stay_as_they_are(text: str) -> None:
    assert to_terminal(text) == text


def test_a_console_keeps_its_own_colours_alone() -> None:
    out = io.StringIO()
    console = _SafeConsole(file=out, force_terminal=True, color_system="standard", markup=False, highlight=False)
    console.print("a\x1b[31mb", style="green")
    assert out.getvalue().removeprefix("\x1b[32m").replace("\x1b[0m", "").strip() == "a\\x1b[31mb"


def test_the_line_of_a_failure_has_the_first_paragraph_the_others_stand_below_the_summary_once() -> None:
    event = {"status": "failed", "message": "No number.\n\nAll of them:\n  row 1", "reason": "a retry cannot help"}
    assert stage_sentence(event, 1.0) == "failed in 1 s: No number. (a retry cannot help)"
