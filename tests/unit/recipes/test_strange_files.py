"""Files as strangers bring them: dates, ids, groups, separators, encodings and texts are read right, or refused."""

from __future__ import annotations

import gc
import itertools
import json
import tracemalloc
from collections import deque
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer_lib.data.rows.parts import SplitParts
from trainer_lib.data.rows.predictions import write_split_predictions
from trainer_lib.data.rows.row_files import RowReader
from trainer_lib.data.rows.row_sources import describe_hidden, find_row_files
from trainer_lib.data.rows.shards import ArrowSplit, write_split
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import PrepareOutput, load
from trainer_lib.recipes.tables.cells import number_of
from trainer_lib.recipes.tables.image_files import find_images
from trainer_lib.recipes.tables.spooled_values import Spool, SpooledValues
from trainer_lib.recipes.tables.table_files import Table, TableForm, read_table
from trainer_lib.recipes.texts.documents import DocumentSplits, TextDocument, read_documents
from trainer_lib.storage import Store
from trainflow.flows.server.schedule import Watch
from trainflow.tasks.keys.sources import fingerprints

Splits = dict[str, list[dict[str, Any]]]
DAYS = [(year, month, day) for year in (2023, 2024) for month in range(1, 13) for day in (5, 15, 25)]
MIXED = [DAYS[place * 29 % len(DAYS)] for place in range(len(DAYS))]
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


def prepared(recipe: str, source: Path, **options: Any) -> tuple[Splits, PrepareOutput]:
    out = PrepareOutput(Store.open(source.parent / "out"), [str(source)])
    splits = load(recipe_file(recipe), source.parent).prepare(options, out)
    return {name: [dict(row) for row in rows] for name, rows in splits.items()}, out


def written(folder: Path, content: str | bytes, name: str = "data.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def labelled(folder: Path, column: str, texts: list[str]) -> Path:
    """A table of a column of texts, numbers from 0 on and labels."""
    rows = [f'"{text}",{number},{"ab"[number % 2]}' for number, text in enumerate(texts)]
    return written(folder, "\n".join([f"{column},x,label", *rows]))


def texts_of(splits: dict[str, Any], *sources: Path, **options: Any) -> dict[str, list[str]]:
    """The texts of each split of documents."""
    usual: dict[str, Any] = {"text": "text", "rename": {}, "separator": None, "files": {}}
    cut = DocumentSplits({**usual, **options, "split": splits}, list(map(str, sources)))
    return {name: [document.text for document in cut.read(name)] for name in cut.names}


# -- dates ------------------------------------------------------------------------------------------------------------


def dates(form: str) -> list[str]:
    """The days in a form; {y}, {m}, {d}, {b} (the month's name) and {h} (an hour with AM or PM) stand for parts."""
    return [form.format(y=y, m=m, d=d, b=MONTHS[m - 1], yy=y % 100) for y, m, d in MIXED]


FORMS: dict[str, str | None] = {
    **dict.fromkeys(("{y}-{m:02}-{d:02}", "{y}/{m}/{d}", "{y}-{m:02}-{d:02}T10:00:00+02:00", "{y}{m:02}{d:02}")),
    **dict.fromkeys(("{d:02}.{m:02}.{y}", "{d}.{m}.{y} 17:30", "{d:02}/{m:02}/{y} 08:00:00 +0100", "{d} {b} {y}")),
    **dict.fromkeys(("{m}/{d}/{y}", "{m}/{d}/{y} 3:15 PM", "{b} {d}, {y}", "{d:02}-{b}-{y}", "{d:02}-{b}-{yy}")),
    "{d:02}{m:02}{y}": "%d%m%Y",
    "{b}-{y}": None,
    "{d:02}.{m:02}.{yy}": "%d.%m.%y",
    "week of {d:02}.{m:02}.{y}": "week of %d.%m.%Y",
}


@pytest.mark.parametrize(
    ("of", "form"),
    [*(("table", form) for form in FORMS), ("texts", "{d:02}.{m:02}.{y}"), ("texts", "{d:02}.{m:02}.{yy}")],
)
def test_no_row_of_train_is_later_than_one_of_test(tmp_path: Path, form: str, of: str) -> None:
    way = {"by": "time", "column": "date", "time_format": FORMS[form]}
    if of == "table":
        path = labelled(tmp_path, "date", dates(form))
        found, _ = prepared("tabular-classification", path, label="label", split=way)
        numbers = {name: [int(row["x"]) for row in rows] for name, rows in found.items()}
    else:
        lines = [json.dumps({"text": str(number), "date": date}) for number, date in enumerate(dates(form))]
        path = written(tmp_path, "\n".join(lines), "data.jsonl")
        numbers = {name: list(map(int, texts)) for name, texts in texts_of(way, path).items()}
    days = {name: [MIXED[number] for number in chosen] for name, chosen in numbers.items()}
    assert max(days["train"]) < min(days["validation"]) <= max(days["validation"]) < min(days["test"])


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([f"0{1 + row % 9}/0{1 + row % 7}/2024" for row in range(40)], "can be read in 2 ways (%d/%m/%Y, %m/%d/%Y)"),
        ([f"{1 + row % 12}.{1 + row % 11}.24" for row in range(40)], "can be read in"),
        ([f"{13 + row % 9:02}0{1 + row % 9}2024" for row in range(40)], "do not begin with the year"),
        ([*(f"{1 + row}.02.2024" for row in range(28)), "soon"], "row 28 (line 30), column 'date': 'soon' is not"),
        ([f"Januar {row}" for row in range(1, 30)], "row 0 (line 2), column 'date': 'Januar 1' is not a time"),
        ([*(f"2024-01-{1 + row:02}" for row in range(30)), "31.01.2024"], "'31.01.2024' is not a time"),
    ],
)
def test_dates_that_can_be_read_in_two_ways_or_in_none_ask_for_their_form(
    tmp_path: Path, texts: list[str], words: str
) -> None:
    path = labelled(tmp_path, "date", texts)
    with pytest.raises(DataError) as caught:
        prepared("tabular-classification", path, label="label", split={"by": "time", "column": "date"})
    assert words in caught.value.message
    assert "prepare.options.split.time_format=" in str(caught.value.remedy)


def test_digits_are_dates_where_their_form_is_given_and_ask_for_it_where_it_is_not(tmp_path: Path) -> None:
    days = [f"2024{month:02}{day:02}" for month in (1, 2, 3) for day in range(1, (31, 29, 31)[month - 1] + 1)]
    path = written(tmp_path, "\n".join(["day,sales", *(f"{day},{number}" for number, day in enumerate(days))]))
    chosen = {"time": "day", "target": "sales", "context": 5, "missing": "previous"}
    found, out = prepared("time-series-forecasting", path, **chosen, time_format="%Y%m%d")
    assert out.info["filled"] == 0
    assert [row["time"] for row in found["train"]][26] == "2024-02-01"
    with pytest.raises(DataError, match="such as 20240101, look like dates") as caught:
        prepared("time-series-forecasting", path, **chosen)
    assert "time_format=%Y%m%d" in str(caught.value.remedy)
    with pytest.raises(DataError, match="can be read in 2 ways"):
        prepared("time-series-forecasting", written(tmp_path, "day,sales\n1/2/2024,1\n2/2/2024,2\n"), **chosen)
    with pytest.raises(ConfigError, match="Only a split by time"):
        prepared("tabular-classification", path, label="sales", split={"time_format": "%Y"})


# -- groups and ids ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "patients", [["A0", *(f"{number:03}" for number in range(20))], ["7", "07", "007", *"1234567"]]
)
def test_a_group_is_its_text_so_that_digits_and_names_may_mix(tmp_path: Path, patients: list[str]) -> None:
    way = {"by": "group", "column": "patient", "test": 0.3}
    path = labelled(tmp_path, "patient", patients * 4)
    found, _ = prepared("tabular-classification", path, label="label", split=way)
    groups = {name: {patients[int(row["x"]) % len(patients)] for row in rows} for name, rows in found.items()}
    assert not any(one & other for one, other in itertools.combinations(groups.values(), 2))
    assert set().union(*groups.values()) == set(patients)


IDS = {
    "beyond float64": [str(2**53 + row) for row in range(40)],
    "twenty digits": [f"1844674407370955{1600 + row}" for row in range(40)],
    "leading zeros": [f"{row:04}" for row in range(40)],
    "a number's forms": [*map(str, range(20)), *map("{}.0".format, range(10)), *map("0{}".format, range(10))],
    "spaces": [*map(" {}".format, range(20)), *map(str, range(20))],
    "texts": [f"{1000 + row}-FCKG" for row in range(40)],
    "numbers among texts": [
        *map(str, range(20)),
        *(f"{row:03}" for row in range(10)),
        *map(str, range(2**64, 2**64 + 10)),
    ],
}


def predict(folder: Path, split: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Store rows, and write the column x of them as if it were a prediction."""
    store = Store.open(folder)
    splits, files = write_split(store, split, rows)
    kept = ArrowSplit({"url": store.url, "files": list(map(asdict, files)), "splits": {split: splits}}, split)
    parts = SplitParts(store, split, rows=len(rows), rows_per_file=99)
    columns = {"x": [row["x"] for row in rows]}
    entry = write_split_predictions(parts, 0, kept.row_ids(0, len(kept)), columns, split=split)
    return pq.read_table(folder / entry.path).to_pylist()  # type: ignore[no-any-return]


KINDS = ["csv", "jsonl", "parquet"]
NUMBERS = [
    ("beyond float64", "numbers.jsonl"),
    ("twenty digits", "numbers.jsonl"),
    ("numbers among texts", "numbers.jsonl"),
    ("twenty digits", "decimal.parquet"),
]


@pytest.mark.parametrize(("name", "kind"), [*itertools.product(IDS, KINDS), *NUMBERS])
def test_ids_come_back_byte_for_byte_in_predictions(tmp_path: Path, name: str, kind: str) -> None:
    texts = IDS[name]
    rows = [{"id": text, "x": row, "label": "ab"[row % 2]} for row, text in enumerate(texts)]
    path = tmp_path / f"data.{kind}"
    if kind == "csv":
        path.write_text("\n".join(["id,x,label", *(f'"{row["id"]}",{row["x"]},{row["label"]}' for row in rows)]))
    elif kind.endswith("jsonl"):
        is_number = [str(int(text)) == text for text in texts] if "numbers" in kind else [False] * len(texts)
        given = [int(text) if number else text for text, number in zip(texts, is_number, strict=True)]
        path.write_text("\n".join(json.dumps({**row, "id": each}) for row, each in zip(rows, given, strict=True)))
    else:
        ids = pa.array(list(map(Decimal, texts)), pa.decimal128(20, 0)) if "decimal" in kind else pa.array(texts)
        pq.write_table(pa.Table.from_pylist(rows).set_column(0, "id", ids), path)
    found, _ = prepared("tabular-classification", path, label="label", id="id")
    predicted = [row for split, rows in found.items() for row in predict(tmp_path / "stored", split, rows)]
    ids = {row["x"]: str(row["row_id"]) for row in predicted}
    assert [ids[row] for row in range(40)] == texts
    new = RowReader(find_row_files([str(path)]), {}, id_column="id")
    assert [str(row.id) for row in new.take_all(99)] == texts


# -- hidden files -----------------------------------------------------------------------------------------------------
HIDDEN = [
    *(".git/objects/a.csv", "cats/.ipynb_checkpoints/0-checkpoint.csv", "cats/._0.csv", "__MACOSX/cats/0.csv"),
    *("cats/Thumbs.db/a.csv", "cats/Desktop.ini", "deep/er/.DS_Store", "deep/.cache/er/x.csv"),
]


@pytest.mark.parametrize("scheme", ["", "memory://"])
@pytest.mark.parametrize("pattern", ["", "/**/*.csv", "/**", "/*/*.csv"])
def test_hidden_files_are_never_data_and_are_counted(tmp_path: Path, scheme: str, pattern: str) -> None:
    url = f"{scheme}{str(tmp_path).lstrip('/') if scheme else tmp_path}/.home/data"  # an address may be hidden itself
    store = Store.open(url)
    for name in ("cats/0.csv", "dogs/0.csv"):
        store.write_bytes(name, b"a,b\n1,2\n")
    before = fingerprints([url + pattern])
    watch = Watch(url, "p/d", None, print)  # type: ignore[arg-type]  # the listing needs no spec
    listing = watch._listing()
    for name in HIDDEN:
        store.write_bytes(name, b"a,b\n1,2\n")
    assert [file.path for file in find_row_files([url + pattern])] == ["cats/0.csv", "dogs/0.csv"]
    assert fingerprints([url + pattern]) == before
    assert watch._listing() == listing
    [sentence] = describe_hidden([url + pattern, "package:numpy"])
    assert describe_hidden([url + pattern, url + pattern]) == [sentence], "sources may have files in common"
    counted = {"": 8, "/**": 8, "/**/*.csv": 6, "/*/*.csv": 1}[pattern]
    assert sentence.startswith(f"{counted} hidden file")
    store.write_bytes("deep/er/0.csv", b"a,b\n1,2\n")
    assert (watch._listing() == listing) is False


def test_a_hidden_folder_is_not_a_class_of_images(tmp_path: Path) -> None:
    for name in ("cats/0.png", "dogs/0.png", "cats/.ipynb_checkpoints/1.png", ".git/2.png", "__MACOSX/dogs/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_images([str(tmp_path)], field="prepare.sources").columns["label"] == ["cats", "dogs"]


# -- columns, separators, encodings -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
def test_the_index_of_pandas_is_left_out_and_said(tmp_path: Path, name: str) -> None:
    rows = [f"{row},{row % 5},{'ab'[row % 2]}" for row in range(40)]
    path = written(tmp_path, "\n".join([f"{name},x,label", *rows]))
    found, out = prepared("tabular-classification", path, label="label")
    assert set(found["train"][0]) == {"row_id", "x", "labels"}
    assert [text for text in out.warnings if f"without the column '{name}'" in text]
    form = TableForm.of(out.info)
    assert form is not None and form.read({name: "7", "x": "1"}, "row 0") == {"x": 1.0}
    found, out = prepared("tabular-classification", path, label="label", features=[name, "x"])
    assert (name in found["train"][0], out.warnings) == (True, [])


TEXTS = [{"text": f"a text {row}", "label": "ab"[row % 2]} for row in range(40)]
PRETTY = json.dumps(TEXTS, indent=2)
BUYERS = [f"{row};{row}.5;München;{'ja' if row % 2 else 'nein'}" for row in range(40)]
SEMICOLONS = "\r\n".join(["Größe;Preis;Ort;Käufer", *BUYERS])
TABS = SEMICOLONS.replace(";", "\t").encode("utf-16")
NESTED = "\n".join(json.dumps({**row, "meta": {"a": [1]}, "spans": [1]}) for row in TEXTS)
FILES: list[tuple[str, str | bytes, str, dict[str, Any], str]] = [
    ("a.jsonl", NESTED, "text", {}, "without the column 'meta', 'spans'"),
    ("a.json", PRETTY, "text", {}, ""),
    ("a.json", json.dumps({"data": TEXTS, "total": 40}, indent=1), "text", {}, ""),
    ("a.json", json.dumps({"rows": TEXTS}), "text", {}, ""),
    ("a.json", "\n".join(json.dumps({**row, "items": []}) for row in TEXTS), "text", {}, "without the column 'items'"),
    ("a.json", "\ufeff" + json.dumps(TEXTS), "text", {}, ""),
    ("a.csv", SEMICOLONS, "tabular", {}, "read with the separator ';'."),
    ("a.csv", SEMICOLONS.encode("latin-1"), "tabular", {}, "with the encoding cp1252 and the separator ';'."),
    ("a.csv", TABS, "tabular", {}, "encoding utf-16 and the separator '\\t'."),
    ("a.csv", SEMICOLONS.encode("utf-16-be"), "tabular", {}, "encoding utf-16-be and the separator ';'."),
    ("a.jsonl", NESTED.encode("utf-16-le"), "text", {"ignore": ["meta", "spans"]}, "encoding utf-16-le."),
    ("a.json", PRETTY.replace("text 1", "täxt").encode("utf-16"), "text", {}, "encoding utf-16."),
    ("a.csv", "\ufeff" + SEMICOLONS.replace(";", ","), "tabular", {}, ""),
]


@pytest.mark.parametrize(("name", "content", "recipe", "options", "said"), FILES)
def test_files_of_other_forms_are_read_and_what_is_unusual_is_said(
    tmp_path: Path, name: str, content: str | bytes, recipe: str, options: dict[str, Any], said: str
) -> None:
    chosen = {**({"text": "text", "label": "label"} if recipe == "text" else {"label": "Käufer"}), **options}
    found, out = prepared(f"{recipe}-classification", written(tmp_path, content, name), **chosen)
    assert sum(map(len, found.values())) == 40
    if recipe == "tabular":
        assert set(found["train"][0]) == {"row_id", "Größe", "Preis", "Ort", "labels"}
        assert (set(out.info["numbers"]), out.info["texts"]) == ({"Größe", "Preis"}, {"Ort": ["München"]})
    assert bool(out.warnings) == bool(said) and all(said in text for text in out.warnings)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "fine", "label": "a"}\n{"text": "\\ud83d", "label": "b"}', "row 1 (line 2): a text has"),
        (
            "a.jsonl",
            '{"text": "a", "label": "a"}\n{"text": "b"}',
            "'label' is missing; all rows have the same columns, with",
        ),
        ("a.json", PRETTY[:-9], "a.json: the file begins as a JSON array, which cannot be read"),
        ("a.json", json.dumps({"train": TEXTS, "dev": []}, indent=1), "its keys are 'train', 'dev'; of an object,"),
        ("a.tsv", 'text\tlabel\n"Hi\ta\nbye"\tb', "at this place: a value in quotes has a tab and the end of a line"),
        ("a.csv", "label,text,,\na,b,,\na,b,c,d", "row 1 (line 3): it has 4 values, and the header has 2 names (more"),
        ("a.jsonl", '{"text": ["a", "b"], "label": "a"}\n' * 20, "row 0 (line 1), column 'text': a list is neither"),
    ],
)
def test_files_that_are_refused_are_named_with_their_row(tmp_path: Path, name: str, content: str, words: str) -> None:
    with pytest.raises(DataError) as caught:
        prepared("text-classification", written(tmp_path, content, name), text="text", label="label")
    assert words in caught.value.message
    assert caught.value.exit_code == 11


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("$1,037.00", 1037.0),
        ("-€ 1.037,50", -1037.5),
        ("1000,50", 1000.5),
        ("1.234.567 €", 1234567.0),
        ("12,345,678", 12345678.0),
        ("5 %", 0.05),
        (" 7.5", 7.5),
        ("1,234", None),
        ("0,234", 0.234),
        ("31.12.2024", None),
        ("A5", None),
        ("$", None),
    ],
)
def test_money_per_cent_and_decimal_commas_are_numbers(text: str, number: float | None) -> None:
    assert number_of(text) == number


# -- documents of text files and tables -------------------------------------------------------------------------------
def read(*sources: str | Path, **more: Any) -> list[TextDocument]:
    settings = {"rename": {}, "separator": None, "field": "prepare.sources", **more}
    return list(read_documents(list(map(str, sources)), **settings))


def write_lines(folder: Path, *rows: dict[str, Any]) -> Path:
    return written(folder, "".join(json.dumps(row) + "\n" for row in rows), "rows.jsonl")


def test_text_files_and_rows_are_documents_in_the_order_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "empty.py").write_text("\n \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    rows = write_lines(tmp_path, {"body": "third", "day": 1})
    found = read(tmp_path / "a.md", tmp_path / "b.txt", rows, rename={"body": "text"})
    assert [each.text for each in found] == ["first", "second\n", "third"]
    assert found[2].values == {"day": 1}
    assert read(rows, rename={"body": "text"}, ignore=["day"])[0].values == {}
    assert found[0].place.endswith("/a.md")
    assert found[2].place.endswith("rows.jsonl, row 0 (line 1)")
    assert [each.text for each in read(tmp_path, text="body")] == ["first", "second\n", "third"]


@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_separator_cuts_a_file_into_documents_whatever_ends_its_lines(
    tmp_path: Path, separator: str, ending: str
) -> None:
    path = written(tmp_path, (ending * 2).join(f"Paragraph {number}{ending}goes on." for number in range(20)), "a.txt")
    found = read(path, separator=separator)
    assert [document.text for document in found] == [f"Paragraph {n}{ending}goes on." for n in range(20)]
    assert found[2].place.endswith("a.txt, document 2")
    [_, other] = read(written(tmp_path, "1\n\n\n\n2", "a.txt"), separator="\n\n")
    assert (other.text, other.place.rpartition(", ")[2]) == ("2", "document 2")


def test_texts_of_installed_packages_are_sources_and_bad_ones_are_refused_with_their_place(tmp_path: Path) -> None:
    assert {"decoder.py", "encoder.py"} <= {Path(each.place).name for each in read("stdlib:json")}
    assert [Path(each.place).name for each in read("stdlib:colorsys.py")] == ["colorsys.py"]
    assert any(each.place.endswith("METADATA") or each.text for each in read("package:tqdm"))
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    (tmp_path / "sheet.xlsx").write_bytes(b"")
    good, empty, number, none = (
        written(tmp_path, f'{{"text": "x"}}\n{{"text": {value}}}\n', f"{name}.jsonl")
        for name, value in (("good", '"y"'), ("empty", '" "'), ("number", 3), ("none", "null"))
    )
    for sources, options, words in (
        (["package:nothing-of-this-name"], {}, "not installed"),
        (["package:tqdm/nowhere"], {}, "There are no texts here"),
        ([tmp_path / "latin.txt"], {}, "latin.txt: the file is not UTF-8"),
        ([empty], {}, "row 1 (line 2), column 'text': the text is empty"),
        ([good], {"text": "texts"}, 'Did you mean "text"?'),
        ([number], {}, "column 'text': a number is not a text"),
        ([none], {}, "there is no text"),
        ([tmp_path / "sheet.xlsx"], {}, "prepare.sources"),
        ([tmp_path / "sheet.xlsx"], {}, ".txt"),
        ([], {}, "nothing to read"),
    ):
        with pytest.raises(TrainflowError) as caught:
            read(*sources, **options)
        assert words in str(caught.value)
        assert caught.value.remedy


def test_splits_of_documents_are_files_or_cut_at_random_by_group_and_by_time(tmp_path: Path) -> None:
    rows = write_lines(tmp_path, *({"text": f"t{n}", "book": n // 5, "day": str(20 - n)} for n in range(20)))
    shares = {"validation": 0.1, "test": 0.2}
    drawn = texts_of(shares, rows)
    assert {name: len(each) for name, each in drawn.items()} == {"train": 14, "validation": 2, "test": 4}
    assert sorted(text for each in drawn.values() for text in each) == sorted(f"t{number}" for number in range(20))
    assert drawn == texts_of(shares, rows)
    assert drawn != texts_of({**shares, "seed": 1}, rows)
    books = texts_of({**shares, "by": "group", "column": "book"}, rows)
    in_train = {int(text[1:]) // 5 for text in books.pop("train")}
    assert not in_train & {int(text[1:]) // 5 for texts in books.values() for text in texts}
    assert texts_of({**shares, "by": "time", "column": "day"}, rows)["test"] == ["t0", "t1", "t2", "t3"]
    first, second = written(tmp_path, "a", "a.txt"), written(tmp_path, "b", "b.txt")
    assert list(texts_of({}, files={"test": second, "train": first}).items()) == [("train", ["a"]), ("test", ["b"])]
    for split, files, words in (
        ({"by": "stratified"}, {}, "no classes"),
        ({"by": "time", "column": "days"}, {}, r'no such column.*Did you mean "day"\?'),
        ({}, {"test": second}, "no split 'train'"),
    ):
        with pytest.raises(TrainflowError, match=words):
            texts_of(split, *([] if files else [rows]), files=files)


# -- memory -----------------------------------------------------------------------------------------------------------
def test_values_come_back_from_the_disk_as_they_were() -> None:
    given = ["", "é\n", None, True, 2**70, -1, 0.1, float("inf"), ("a", 1), [1], *map(str, range(5000))]
    spool = Spool()
    values, other = SpooledValues(spool, 1 << 20), SpooledValues(Spool(), 1 << 20)
    for value in given:
        values.append(value)
    other.extend(given)
    values.extend(other)
    assert spool.file.seek(0, 2) > 1000, "most of them are not in memory"
    assert list(values) == [values[place] for place in range(len(values))] == given * 2
    assert values[7:5012:9] == (given * 2)[7:5012:9]
    assert type(values[8]) is tuple


@pytest.mark.parametrize(("name", "label"), [("tabular-classification", "label"), ("tabular-regression", "b")])
def test_the_memory_of_prepare_does_not_grow_with_the_table(tmp_path: Path, name: str, label: str) -> None:
    path, recipe = tmp_path / "data.csv", load(recipe_file(name), tmp_path)

    def read(*args: Any, **options: Any) -> Table:
        table = read_table(*args, **options)
        spooled: Any = (table.places, *table.columns.values())
        for values in spooled:
            values._store()  # the last chunk of a column is as large as thousands of its numbers
        tracemalloc.reset_peak()  # a file's buffers are larger than what stays of these rows
        return table

    def peak(rows: int) -> int:
        with path.open("w") as file:
            file.write("id,a,b,label\n")
            file.writelines(f"{row:08}-AB,{row / 7:.4f},{row / 9:.4f},{'xy'[row % 2]}\n" for row in range(rows))
        gc.collect()
        tracemalloc.start()
        out = PrepareOutput(Store.open(tmp_path / "out"), [str(path)])
        for stored in recipe.prepare({"label": label, "id": "id"}, out).values():
            deque(stored, 0)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer_lib.recipes.tables.spooled_values.SPOOL_BYTES", 1 << 16)
        patch.setattr("trainer_lib.recipes.tables.table_files._AT_ONCE", 125)
        patch.setattr("trainer_lib.recipes.tables.rows._AT_ONCE", 125)
        patch.setattr("trainer_lib.recipes.tables.table_files.read_table", read)
        _, small, large = (peak(rows) for rows in (100, 2_500, 7_500))  # the first imports modules
    # For the numbers of rows (two bytes up to 32,768) and classes, and those of a column or the digests of the ids.
    assert large - small < 5_000 * 16
