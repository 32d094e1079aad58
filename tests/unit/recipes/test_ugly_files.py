"""Files as people have them, from the file to prepared rows: a table says what is written and what is right."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import sys
import types
import zipfile
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from trainer_lib.data.rows.row_files import RowReader, read_rows
from trainer_lib.data.rows.row_sources import find_row_files
from trainer_lib.errors import MissingExtraError, TrainflowError
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, load
from trainer_lib.recipes.tables.cells import date_parts, word_counts
from trainer_lib.recipes.tables.table_files import TableForm
from trainer_lib.storage import Store

ROWS = 20
NAMELESS = {"columns": ["x", "label", "Ort"]}


@dataclass
class Ugly:
    """A file and what becomes of it."""

    content: str | bytes  # of the file; or a row as a text, with {n} for its number, {l} for its label
    name: str = "data.csv"  # of the file
    head: str = ""  # the lines above the rows
    options: dict[str, Any] = field(default_factory=dict)  # those of the recipe besides the label
    first: dict[str, Any] = field(default_factory=dict)  # values of the row 0 in the prepared rows
    words: tuple[str, ...] = ()  # what warnings say
    encoding: str = "utf-8"  # of a text
    new: dict[str, Any] = field(default_factory=dict)  # a new row in the same form, and what the model gets of it

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = self.content.encode() if isinstance(self.content, str) and "{l}" not in self.content else self.content
        if isinstance(content, str):
            lines = [content.replace("{n}", str(10 + row)).replace("{l}", "ab"[row % 2]) for row in range(ROWS)]
            content = "\n".join([*([self.head] if self.head else []), *lines, ""]).encode(self.encoding)
        path.write_bytes(content)
        return path


def prepared(source: Path, recipe: str = "tabular-classification", **options: Any) -> tuple[Any, PrepareOutput]:
    """All prepared rows by their ids, and what prepare noted."""
    out = PrepareOutput(Store.open(source.parent / "out"), [str(source)])
    splits = load(recipe_file(recipe), source.parent).prepare({"label": "label", **options}, out)
    rows = {row["row_id"]: dict(row) for split in splits.values() for row in split}
    return rows, out


def form_of(out: PrepareOutput) -> TableForm:
    form = TableForm.of(out.info)
    assert form is not None
    return form


def refused(source: Path, **options: Any) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        prepared(source, **options)
    return caught.value


PLAIN = "x,label\n" + "".join(f"{10 + row},{'ab'[row % 2]}\n" for row in range(ROWS))
ZIPPED = io.BytesIO()
with zipfile.ZipFile(ZIPPED, "w") as archive:
    archive.writestr("__MACOSX/._data.csv", "")
    archive.writestr("data.csv", PLAIN)

READ: dict[str, Ugly] = {
    "a separator": Ugly("{n}~{l}", head="x~label", options={"read": {"separator": "~"}}, first={"x": 10}),
    "Excel's first line": Ugly("{n}#{l}", head="sep=#\nx#label", first={"x": 10}, words=("the separator '#'",)),
    "Windows-1252": Ugly("{n};Köln;{l}", head="x;Ort;label", encoding="cp1252", first={"Ort": "Köln"}),
    "Cyrillic": Ugly(
        "{n};Казань и Москва;{l}", head="x;город;label", encoding="cp1251", first={"город": "Казань и Москва"},
        words=("the encoding cp1251",),
    ),
    "Japanese": Ugly("{n},東京の天気,{l}", head="x,都市,label", encoding="cp932", first={"都市": "東京の天気"}),
    "an encoding": Ugly(
        "{n},café,{l}", head="x,c,label", encoding="mac_roman", options={"read": {"encoding": "mac_roman"}},
        first={"c": "café"},
    ),
    "no header": Ugly("{n},{l}", options={"read": {"columns": ["x", "label"]}}, first={"x": 10}),
    "lines above": Ugly(
        "{n},{l}", head="Report\n\nx,label", options={"read": {"skip_lines": 2}}, first={"x": 10}
    ),
    "single quotes": Ugly("{n},'a, b',{l}", head="x,c,label", options={"read": {"quote": "'"}}, first={"c": "a, b"}),
    "no quotes": Ugly('{n},5" pipe,{l}', head="x,c,label", options={"read": {"quote": ""}}, first={"c": '5" pipe'}),
    "escaped quotes": Ugly(
        '{n},"say \\"hi\\", then",{l}', head="x,c,label", options={"read": {"escape": "\\"}},
        first={"c": 'say "hi", then'},
    ),
    "decimal": Ugly(
        "{n};1.234;{l}", head="n;x;label", options={"read": {"decimal": ","}}, first={"x": 1234.0},
        new={"n": "1", "x": "2.345,5 €", "expected": 2345.5},
    ),
    "thousands": Ugly(
        '{n},"$1,234",{l}', head="n,x,label", options={"read": {"thousands": ","}}, first={"x": 1234.0},
        new={"n": 1, "x": "2,345", "expected": 2345.0},
    ),
    "spaced thousands": Ugly("{n};1 234,5;{l}", head="n;x;label", first={"x": 1234.5}, words=("'1 234,5' is 1234.5",)),
    "no-break spaces": Ugly("{n};12\u202f345 €;{l}", head="n;x;label", first={"x": 12345.0}),
    "a currency's code": Ugly("{n};−1'2{n},50 EUR;{l}", head="n;x;label", first={"x": -1210.5}, words=("is -1210.5.",)),
    "thousands with a code": Ugly(
        "{n};1.2{n} EUR;{l}", head="n;x;label", options={"read": {"decimal": ","}}, first={"x": 1210.0},
        new={"n": 1, "x": "EUR 2.345", "expected": 2345.0},
    ),
    "perhaps thousands": Ugly("1.2{n},{l}", head="x,label", first={"x": 1.21}, words=('decimal="," reads thousands',)),
    "names like numbers": Ugly("{n}E5,{l}", head="x,label", first={"x": 1e6}, words=("[x] reads names).",)),
    "numbers beyond 64 bits": Ugly("123456789012345678{n},{l}", head="x,label", words=("which 32 bits round",)),
    "no values": Ugly("{n},,{l}", head="x,y,label", first={"y": ""}, words=("The column 'y' has no values.",)),
    "names twice": Ugly(
        "{n},1,{l}", head="x,x,label", options={"read": {"columns": ["x", "y", "label"], "skip_lines": 1}},
        first={"x": 10.0, "y": 1.0},
    ),
    "a column without a name": Ugly("{n},{l},", head="x,label,", first={"x": 10.0}, words=("it has no name",)),
    "units that are not known": Ugly("{n} kg,{l}", head="x,label", first={"x": "10 kg"}, words=("such as '10 kg'",)),
    "underscores": Ugly("1_{n},{l}", head="x,label", first={"x": "1_10"}),
    "gaps by name": Ugly(
        "{n},{l},?", head="n,label,x", options={"read": {"na_values": ["?", 10]}, "missing": "mean"}, first={"x": ""},
        words=("Read as no value: '?' (20), '10' (1).",),
    ),
    "NA among numbers": Ugly(
        PLAIN.replace("11,b", "NA,b").encode(), options={"missing": "mean"}, first={"x": 10},
        words=("1 texts such as 'NA' as no value",), new={"x": "NA", "expected": None},
    ),
    "gzip": Ugly(gzip.compress(PLAIN.encode()), name="data.csv.gz", first={"x": 10}),
    "bzip2": Ugly(bz2.compress(PLAIN.encode()), name="data.csv.bz2", first={"x": 10}),
    "xz": Ugly(lzma.compress(PLAIN.encode()), name="data.csv.xz", first={"x": 10}),
    "zstd": Ugly(pa.compress(PLAIN.encode(), "zstd", asbytes=True), name="data.csv.zst", first={"x": 10}),
    "zip": Ugly(ZIPPED.getvalue(), name="data.csv.zip", first={"x": 10}),
    "a packed array": Ugly(
        bz2.compress(json.dumps([{"x": 10 + row, "label": "ab"[row % 2]} for row in range(ROWS)]).encode()),
        name="data.json.bz2", first={"x": 10},
    ),
    "columns that were in use": Ugly("{n};{l};;", head="x;label;;", first={"x": 10}),
    "blanks behind separators": Ugly(
        '{n}, "a, b", {l}', head=" x, c , label", first={"c": "a, b"}, new={"x": "5", "c": "", "expected": 5.0}
    ),
    "years as columns": Ugly("{n},{n},{l}", head="2019,2020,label", first={"2019": 10}, words=("looks like a row",)),
}  # fmt: skip

COLUMNS: dict[str, Ugly] = {
    "a point next to commas": Ugly("1.2{n};1,5;{l}\n1.25;1,5;{l}", head="x;y;label", first={"x": 1.21}),
    "days first": Ugly(
        "{n}/02/2020,{n},{l}", head="x,n,label", options={"dates": {"x": None}},
        first={"x": "2020-02-10T00:00:00"}, new={"n": 1, "x": "28/02/2020", "expected": "2020-02-28T00:00:00"},
    ),
    "months first": Ugly(
        "02/03/20{n} 14:30,{l}", head="x,label", options={"dates": {"x": "%m/%d/%Y %H:%M"}},
        first={"x": "2010-02-03T14:30:00"}, new={"x": "2020-02-28T10:00", "expected": "2020-02-28T10:00:00"},
    ),
    "zones": Ugly(
        "2024-01-{n}T23:30:00-02:00,{l}", head="x,label", options={"dates": {"x": None}},
        first={"x": "2024-01-11T01:30:00"}, new={"x": "2024-01-11T12:00Z", "expected": "2024-01-11T12:00:00"},
    ),
    "a date is missing": Ugly(
        "2024-01-{n},{l}\n,a", head="x,label", options={"dates": {"x": None}, "missing": "mean"},
        first={"x": "2024-01-10T00:00:00"}, new={"x": None, "expected": ""},
    ),
    "dates as texts": Ugly("{n}.02.2020,{l}", head="x,label", words=("prepare.options.dates={x: null} reads dates",)),
    "free text": Ugly(
        "The {n}th customer is not amused,{l}", head="x,label", options={"hashed": {"x": 16}},
        first={"x": "The 10th customer is not amused"}, new={"x": 7, "expected": "7"},
    ),
    "case and blanks": Ugly(
        "New  York,{n},{l}\nnew york,{n},B\nx,{n},A", head="x,n,label", options={"merge": ["x", "label"]},
        first={"x": "new york"}, new={"n": 1, "x": " NEW York", "expected": "new york"},
    ),
    "gaps among categories": Ugly(
        "{n},\\N,{l}\n{n},N/A,{l}\n{n},Paris,{l}", head="x,c,label", options={"missing": "mean"}, first={"c": ""},
    ),
    "gaps among amounts": Ugly(
        "n/a,{n},{l}\n\"$1,000.50\",{n},{l}", head="x,n,label", options={"missing": "mean"}, words=("is 1000.5",),
    ),
    "two classes of one number": Ugly(
        "{n},{l},1\n{n},{l},0\n{n},{l},1.0", head="x,c,label", first={"c": "a"},
        words=("'1' and '1.0', which are one number and count as two texts.",),
    ),
    "a class of rows without a label": Ugly(
        "{n},{l},0\n{n},{l},1\n{n},{l},2\n{n},{l},-1", head="x,c,label", first={"x": 10.0},
        words=("'-1', with which many data sets mark",), options={"split": {"validation": 0}},
    ),
    "a class that R reads as no value": Ugly(
        "{n},{l},a\n{n},{l},NA", head="x,c,label", first={"c": "a"}, words=("class 'NA', which other programs read",),
    ),
    "capitals that are no money": Ugly(
        "{n},XYZ 1.200,{l}", head="n,x,label", options={"read": {"decimal": ","}}, first={"x": "XYZ 1.200"},
    ),
    "two groups in two spellings": Ugly(
        "{n},{n},{l}\n{n},k{n},{l}\n{n},K{n},{l}", head="x,g,label", first={"x": 10.0},
        options={"split": {"by": "group", "column": "g"}, "features": ["x"], "absent_classes": True},
        words=("'k10' and 'K10', which differ in case or blanks only",),
    ),
    "numbers far from zero": Ugly(
        "17000000{n},{l}", head="x,label", first={"x": 1700000010.0},
        words=("'x' differ by some", "around 17000000", "subtract a constant"),
    ),
    "zeros in front": Ugly(
        "{n},{n},{l}\n0{n},{n},{l}", head="x,n,label", first={"x": 10.0},
        words=("'010' is 10 (prepare.options.categorical=[x] reads names).",),
    ),
    "numbers as names": Ugly(
        "{n}.0,{n},{l}", head="x,n,label", options={"categorical": ["x"]}, first={"x": "10"},
        new={"n": 1, "x": 11.0, "expected": "11"},
    ),
    "case is pointed at": Ugly(
        "New  York,{n},{l}\nnew york,{n},B", head="x,n,label", first={"x": "New  York"},
        words=("prepare.options.merge=[x] makes them one", "'B' and 'b', which differ in case"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_become_features_for_prepared_and_for_new_rows(tmp_path: Path, name: str) -> None:
    ugly = COLUMNS[name]
    rows, out = prepared(ugly.write(tmp_path), **ugly.options)
    assert {column: rows[0][column] for column in ugly.first} == ugly.first
    assert [words for words in ugly.words if not any(words in warning for warning in out.warnings)] == []
    facts = {"info": out.info, "splits": {}, "url": "", "files": []}
    recipe, data = load(recipe_file("tabular-classification"), tmp_path), DataInfo(facts)
    collate = recipe.collate_with(data)
    assert collate is not None
    chosen = list(rows.values())[:8]
    if ugly.new:
        new = form_of(out).read({column: value for column, value in ugly.new.items() if column != "expected"}, "row 0")
        assert new["x"] == ugly.new["expected"]
        chosen.append({**new, "labels": 0})
    batch = collate(chosen)
    model: Any = recipe.build_model({"hidden": [4]}, data)
    assert len(out.info["numbers"]) == batch["numbers"].shape[1] == len(model.mean)
    assert torch.isfinite(model(**batch)["loss"])


def test_parts_of_dates_and_words_are_numbers() -> None:
    assert date_parts("2024-02-18T06:30:00") == [2024, 2, 6, 6.5, 8814.270833333334]
    one, other = word_counts("It works, it does", 8), word_counts("it works it DOES!", 8)
    assert one == other != word_counts("it does not", 8)


@pytest.mark.parametrize(
    ("ugly", "words"),
    [
        (Ugly("x,label\n" + "".join(f"Text {row},{row % 2}\n" for row in range(60))), "hashed={x: 64}"),
        (Ugly("{n}/01/2020 0{n}:00,{l}", head="x,label", options={"dates": {"x": "%Y"}}), "not a time of the form %Y"),
        (Ugly("01/02/20{n},{l}", head="x,label", options={"dates": {"x": None}}), "can be read in 2 ways"),
        (Ugly("202001{n},{l}", head="x,label", options={"dates": {"x": None}}), "can be read in several ways"),
        (Ugly('"1,2{n}",{l}', head="x,label"), "row 0 (line 2), column 'x': '1,210' can be read in two ways"),
        (Ugly("1.2{n} €;{l}\n5,50;a", head="x;label"), 'prepare.options.read.decimal=","'),
        (Ugly("1.2{n};{n},5;{l}", head="x;y;label"), "column 'x': '1.210' can be read in two ways"),
        (Ugly(gzip.compress(PLAIN.encode())), "the content is packed by gzip (.gz), not text"),
        (Ugly(ZIPPED.getvalue(), name="data.jsonl"), "the content is a workbook or a zip archive"),
        (Ugly("{n},{n},{l}", head="x,x,label"), "read.columns=[…], with prepare.options.read.skip_lines=1"),
        (Ugly(PLAIN.encode() + b"x,label\n"), "row 20 (line 22): it repeats the names of the columns"),
        (Ugly(PLAIN.encode() + b"1,c\n"), "Give more rows of it, or set prepare.options.absent_classes=true"),
        (Ugly("{n} %,{l}\n{n},{l}", head="x,label"), "several units, such as '10 %' and '10'"),
        (Ugly("{n} $,{l}\nEUR {n},{l}", head="x,label"), "several units, such as '10 $' and 'EUR 10'"),
        (
            Ugly("2024-01-{n} 09:00,{l}\n2024-01-{n}T09:00Z,a", head="x,label", options={"dates": {"x": None}}),
            "a time zone",
        ),
        (Ugly("{n}.5.2020,{l}\n,a", head="x,label", options={"dates": {"x": None}}), "missing=mean"),
        (Ugly("{n},{l}", head="x,label", options={"dates": {"y": None}}), "Choose one of: x, label"),
        (Ugly("{n},{l}", head="x,label", options={"hashed": {"x": 0}}), "number of numbers"),
    ],
)
def test_a_column_that_is_not_what_the_spec_says_is_refused_with_what_settles_it(
    tmp_path: Path, ugly: Ugly, words: str
) -> None:
    assert words in str(refused(ugly.write(tmp_path), **ugly.options))


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_as_the_spec_says_or_as_it_shows_itself(tmp_path: Path, name: str) -> None:
    ugly = READ[name]
    rows, out = prepared(ugly.write(tmp_path), **ugly.options)
    assert len(rows) == ROWS
    assert {column: rows[0][column] for column in ugly.first} == ugly.first
    assert [words for words in ugly.words if not any(words in warning for warning in out.warnings)] == []
    if ugly.new:
        read = form_of(out).read({column: value for column, value in ugly.new.items() if column != "expected"}, "row 0")
        assert read["x"] == ugly.new["expected"] or (ugly.new["expected"] is None and read["x"] != read["x"])


def test_the_folders_of_a_partition_are_columns_where_the_spec_says_so(tmp_path: Path) -> None:
    for year in (2023, 2024):
        Ugly("{n},{l}", head="x,label", name=f"data/year={year}/part.csv").write(tmp_path)
    rows, out = prepared(tmp_path / "data", read={"partitions": True})
    assert {row["year"] for row in rows.values()} == {2023.0, 2024.0}
    rows, out = prepared(tmp_path / "data")
    assert "year" not in rows[0]
    assert any("folders such as year=2023" in warning for warning in out.warnings)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        ({"seperator": ";"}, 'Did you mean "separator"?'),
        ({"separator": "||"}, "This is one character"),
        ({"separator": 1}, "takes text"),
        ({"encoding": "latin9000"}, "knows no such encoding"),
        ({"decimal": ",", "thousands": ","}, "One mark cannot"),
    ],
)
def test_a_wrong_way_of_reading_is_refused_with_its_setting(tmp_path: Path, read: dict[str, Any], words: str) -> None:
    error = refused(Ugly(PLAIN.encode()).write(tmp_path), read=read)
    assert words in str(error)
    assert str(error.field).startswith("prepare.options.read.")


@pytest.mark.parametrize(
    ("training", "new", "found"),
    [
        ("1.2{n},50;{l}\nNA;a", "1.500,00", 1500.0),
        ("1.2{n},50;{l}\nNA;a", "1.500", "'1.500' can be read in two ways: the training had decimal commas"),
        ("1.2{n},50;{l}\nNA;a", "15.5", 15.5),
        ("1.2{n},50;{l}\nNA;a", 1.125, 1.125),
        ("1.2{n},50;{l}\n1,200.5;a", "2,100.5", 2100.5),
        ("{n} %;{l}", "5 %", 0.05),
        ("{n} %;{l}", 0.05, 0.05),  # as a workbook has it
        ("{n} %;{l}", "5", "'5' is a number without a unit, and those of the training are in %"),
        ("{n};{l}", "5%", "'5%' is a number in %, and those of the training are without a unit"),
        ("{n} €;{l}", "$5", "'$5' is a number in $, and those of the training are in €"),
        ("{n} €;{l}", "5", 5.0),
        ("2024-01-{n}T09:30;{l}", "2024-01-10T09:30Z", "has a time zone"),
        ("2024-01-{n}T09:30Z;{l}", "2024-01-10T09:30", "has no time zone"),
    ],
)
def test_a_new_value_that_means_something_else_than_those_of_the_training_is_refused(
    tmp_path: Path, training: str, new: Any, found: float | str
) -> None:
    options: dict[str, Any] = {"dates": {"x": None}} if "T" in training else {}
    _, out = prepared(Ugly(training, head="x;label").write(tmp_path), missing="mean", **options)
    form = form_of(out)
    if isinstance(found, float):
        assert form.read({"x": new}, "row 0") == {"x": found}
        return
    with pytest.raises(TrainflowError, match=re.escape(found)):
        form.read({"x": new}, "row 0")


def test_true_and_false_of_a_typed_file_may_be_words_in_a_new_one(tmp_path: Path) -> None:
    lines = [json.dumps({"x": row % 3 == 0, "label": "ab"[row % 2]}) for row in range(ROWS)]
    _, out = prepared(Ugly("\n".join(lines), name="data.jsonl").write(tmp_path))
    form = form_of(out)
    found = [form.read({"x": value}, "row 0")["x"] for value in (True, "True", "FALSE", "1", 0.0)]
    assert found == [1.0, 1.0, 0.0, 1.0, 0.0]
    with pytest.raises(TrainflowError, match="'yes' is neither true nor false"):
        form.read({"x": "yes"}, "row 0")


def test_objects_of_json_may_lack_what_is_null_and_unknown_texts_are_counted(tmp_path: Path) -> None:
    _, out = prepared(Ugly("{n},red,{l}\n,blue,a", head="x,c,label").write(tmp_path), missing="mean")
    form, path = form_of(out), tmp_path / "new.jsonl"
    path.write_text('{"x": 1, "c": "red"}\n{"x": 1}\n{"c": "pink"}\n{"c": "pink"}\n')
    reader = RowReader(find_row_files([str(path)]), {}, may_lack=form.may_lack, read=form.read, reading=form.reading)
    found = [row.values for row in reader.take_all(5)]  # type: ignore[union-attr]
    reader.close()
    assert found[:2] == [{"x": 1.0, "c": "red"}, {"x": 1.0, "c": ""}]
    assert [str(row["x"]) for row in found[2:]] == ["nan", "nan"]
    assert form.describe_unknown() == [
        "The column 'c' has a text that no training row has in 3 rows, such as 'pink': "
        "such texts are all alike for the model."
    ]


@pytest.mark.parametrize(
    ("ugly", "read", "new"),
    [
        (Ugly("{n};Köln;{l}", head="x;Ort;label", encoding="cp1252"), {"separator": ";"}, "x,Ort\n1,Köln\n"),
        (Ugly("{n},{l},Köln", head="1,a,Köln"), NAMELESS, "1,b,Köln\n"),
        (Ugly("{n},{l},Köln", head="1,a,Köln"), NAMELESS, "1,Köln\n"),
        (Ugly("{n},{l},Köln", head="1,a,Köln"), NAMELESS, "x,label,Ort\n1,b,Köln\n"),
        (Ugly("{n},{l},Köln", head="1,a,Köln"), NAMELESS, "x,Ort\n1,Köln\n"),
    ],
)
def test_new_rows_are_read_as_the_files_of_the_training_and_may_lack_the_label(
    tmp_path: Path, ugly: Ugly, read: dict[str, Any], new: str
) -> None:
    _, out = prepared(ugly.write(tmp_path), read=read)
    form, path = form_of(out), tmp_path / "new.csv"
    path.write_text(new)
    reader = RowReader(find_row_files([str(path)]), {}, ignored=["label"], read=form.read, reading=form.reading)
    (row,) = reader.take_all(5)
    reader.close()
    assert {name: row.values[name] for name in ("x", "Ort")} == {"x": 1.0, "Ort": "Köln"}  # type: ignore[union-attr]


def test_packed_copies_and_workbooks_are_read_where_they_are_named_and_not_in_a_folder(tmp_path: Path) -> None:
    Ugly(PLAIN.encode()).write(tmp_path / "data")
    for name in ("data.csv.zip", "data.csv.bz2", "data.xlsx"):
        (tmp_path / "data" / name).write_bytes(b"")
    assert [file.path for file in find_row_files([str(tmp_path / "data")])] == ["data.csv"]
    assert [file.path for file in find_row_files([f"{tmp_path}/data/*.zip"])] == ["data.csv.zip"]
    for name in ("dataset_dict.json", "train/dataset_info.json", "train/state.json", "train/data.arrow", "state.json"):
        (tmp_path / "saved" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "saved" / name).touch()
    for address in (f"{tmp_path}/saved", f"{tmp_path}/saved/**"):  # as `datasets` saves them
        assert [file.path for file in find_row_files([address])] == ["state.json", "train/data.arrow"]


#: Two sheets with the same rows: one begins with its names, one with a title; the second has formatted cells below.
_ROWS: list[tuple[Any, ...]] = [
    ("x", "when", "label", None),
    *((number, datetime(2024, 1, 1 + number), "ab"[number % 2], None) for number in range(ROWS)),
]
SHEETS = {"Orders": [*_ROWS, (None, None, None, None)], "Notes": [("Exported",), *_ROWS]}


class _Book:
    """What openpyxl gives of a workbook with two sheets; the package itself is an extra."""

    sheetnames = tuple(SHEETS)

    def __getitem__(self, name: str) -> Any:
        return types.SimpleNamespace(iter_rows=lambda min_row, values_only: iter(SHEETS[name][min_row - 1 :]))


@pytest.fixture(params=["a stand-in", pytest.param("openpyxl", marks=pytest.mark.needs("openpyxl"))])
def workbook(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "data.xlsx"
    if request.param == "a stand-in":
        path.write_bytes(b"PK")
        opened = types.SimpleNamespace(load_workbook=lambda stream, read_only, data_only: _Book())
        monkeypatch.setitem(sys.modules, "openpyxl", opened)
        return path
    import openpyxl

    book = openpyxl.Workbook(write_only=True)
    for name, rows in SHEETS.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


def test_sheets_of_a_workbook_are_tables(workbook: Path) -> None:
    notes: list[str] = []
    place, row = next(read_rows(find_row_files([str(workbook)]), notes))
    assert (place.rpartition(", ")[2], row) == ("row 0 (line 2)", {"x": 0, "when": datetime(2024, 1, 1), "label": "a"})
    assert "the first sheet is read, 'Orders'; it has Notes as well" in notes[0]
    rows, _ = prepared(workbook, read={"sheet": "Notes", "skip_lines": 1}, split={"by": "time", "column": "when"})
    assert len(rows) == ROWS
    with pytest.raises(TrainflowError, match="no such sheet"):
        prepared(workbook, read={"sheet": "Order"})


def test_a_workbook_asks_for_openpyxl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.xlsx").write_bytes(b"PK")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(MissingExtraError, match=r"trainflow\[excel\]"):
        prepared(tmp_path / "data.xlsx")


def test_all_problems_of_rows_and_columns_are_listed_with_what_settles_them(tmp_path: Path) -> None:
    lines = ["id,price,size,day,note,label"]
    lines += [f"{row},{row},{row},2024-01-{1 + row % 28:02},text {row},{'ab'[row % 2]}" for row in range(60)]
    for row in (3, 5, 7, 9):
        lines[1 + row] = f"{row},none,{row},2024-01-01,text {row},a"
    lines[1 + 20] = "19,20,20,2024-01-01,text 20,"
    lines[1 + 30] = "30,30,,,text 30,a"
    lines[1 + 40] += ",more"
    path = Ugly("\n".join(lines)).write(tmp_path)
    message = refused(path, id="id", dates={"day": None}).message
    assert message.startswith(f"{path}, row 40 (line 42): it has 7 values")
    assert message.partition("\n    -> ")[2].startswith("Correct the file.")
    for words in (
        "row 20 (line 22), column 'label': there is no value, as in 1 of 59 rows",
        "Two rows have one id.",
        "row 3 (line 5), column 'price': 'none' is not a number, and 55 of the 59 values of this column are.",
        "row 30 (line 32), column 'size': there is no value",
        "row 30 (line 32), column 'day': there is no value",
        "'note' has 59 different texts",
    ):
        problem = message.partition("All that prepare-data found:\n")[2].partition(words)[2]
        assert problem.partition("\n    -> ")[2], words
    assert "prepare.options.hashed={note: 64}" in message and "prepare.options.missing=mean" in message
    settled: dict[str, Any] = {"dates": {"day": None}, "hashed": {"note": 8}, "missing": "mean"}
    message = refused(path, **settled, read={"na_values": ["none"]}).message
    assert "row 40 (line 42)" in message and "'price'" not in message


def test_more_bad_rows_than_can_be_listed_end_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("x,label\n" + "1,a,b\n" * 1500)
    message = refused(path).message
    assert message.count("row 0 (line 2): it has 3 values") == 2
    assert re.search(r"\n  and 98\d more$", message)
