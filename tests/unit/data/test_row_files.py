"""New rows and predictions: read alike from every format, typed like prepared ones, written as columns or lines."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer_lib.data.rows.column import Column
from trainer_lib.data.rows.given_rows import GivenRows, convert_together
from trainer_lib.data.rows.parts import numbered_parts
from trainer_lib.data.rows.predictions import build_table, to_parquet, write_row_predictions
from trainer_lib.data.rows.row_files import BadRow, Row, RowReader
from trainer_lib.data.rows.row_sources import find_row_files
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.storage import Store

COLUMNS = {"text": Column("string"), "x": Column("list", "float64"), "n": Column("scalar", "int64")}
ROWS = [{"id": f"r{n}", "text": f'a "quoted"\nline, {n}', "x": [n / 2, -1.0], "n": n} for n in range(2500)]
_OPEN: list[RowReader] = []


def _csv(path: Path) -> None:
    lines = ["id,text,x,n"]
    for row in ROWS:
        text = str(row["text"]).replace('"', '""')
        lines.append(f'{row["id"]},"{text}","{json.dumps(row["x"])}",{row["n"]}')
    path.write_text("\ufeff" + "\r\n".join(lines) + "\r\n\r\n", encoding="utf-8", newline="")


def _json_lines(path: Path) -> None:
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")


def _packed(path: Path) -> None:
    _json_lines(path)
    path.write_bytes(gzip.compress(path.read_bytes()))


def _parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=700)


def _arrow(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    create = pa.ipc.new_file if path.suffix == ".feather" else pa.ipc.new_stream
    with create(str(path), table.schema) as writer:
        writer.write_table(table)


@pytest.fixture(autouse=True)
def _readers_are_closed() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def _reader(path: Path | str, **how: Any) -> RowReader:
    _OPEN.append(RowReader(find_row_files([str(path)]), COLUMNS, **how))
    return _OPEN[-1]


def _rows(reader: RowReader, most: int) -> list[Row]:
    taken = []
    for row in reader.take_all(most):
        if isinstance(row, BadRow):
            raise row.error
        taken.append(row)
    return taken


def _take(reader: RowReader) -> list[dict[str, Any]]:
    return [{"id": row.id, **row.values} for row in _rows(reader, 10_000)]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("new.csv", _csv),
        ("new.jsonl", _json_lines),
        ("new.jsonl.gz", _packed),
        ("new.parquet", _parquet),
        ("new.feather", _arrow),
        ("new.arrow", _arrow),
    ],
)
def test_every_format_gives_the_same_rows_and_can_skip(
    name: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    write(tmp_path / name)
    reader = _reader(tmp_path / name)
    assert [row.values for row in _rows(reader, 3)] == [{k: v for k, v in row.items() if k != "id"} for row in ROWS[:3]]
    assert _take(reader) == ROWS[3:] and (reader.position, reader.share, reader.id_column) == (2500, 1.0, "id")
    again = _reader(tmp_path / name)
    again.skip(1300)
    assert _take(again) == ROWS[1300:]
    assert _reader(tmp_path / name).skip(2501) == 2500


def test_files_are_one_sequence_and_rows_without_ids_are_numbered_over_all_of_them(tmp_path: Path) -> None:
    for day, name in ((2, "b.csv"), (1, "a.csv"), (1, "_SUCCESS"), (1, "notes.txt")):
        (tmp_path / f"day={day}").mkdir(exist_ok=True)
        (tmp_path / f"day={day}" / name).write_text(f"n,text\n{day}0,x\n{day}1,y\n")
    for address in (tmp_path, tmp_path / "day=*" / "*.csv", tmp_path / "**" / "*.csv", f"{tmp_path}/day=[12]/?.csv"):
        taken = _rows(_reader(address), 10)
        assert [(row.id, row.values["n"]) for row in taken] == [(0, 10), (1, 11), (2, 20), (3, 21)]
    assert taken[3].place.endswith("day=2/b.csv, row 1 (line 3)")


def test_ids_come_from_the_column_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"key": 7, "n": 1, "note": "x"}\n')
    [row] = _rows(_reader(tmp_path / "a.jsonl", id_column="key", ignored=["note"]), 9)
    assert (row.id, row.values) == (7, {"n": 1})
    with pytest.raises(DataError, match=r"a.jsonl, row 0 \(line 1\), column 'keys'.*the nearest is 'key'"):
        _rows(_reader(tmp_path / "a.jsonl", id_column="keys"), 1)
    (tmp_path / "b.jsonl").write_text('{"id": 1.5, "n": 1}\n')
    with pytest.raises(DataError, match="an integer or a text, not float"):
        _rows(_reader(tmp_path / "b.jsonl"), 1)


def test_a_flat_list_is_an_array_of_the_columns_shape_and_a_ragged_one_is_refused(tmp_path: Path) -> None:
    column = {"scan": Column("array", "float32", (2, 2))}
    rows = []
    for name, text in (("a.csv", 'scan\n"[1, 2, 3, 4]"\n'), ("a.jsonl", '{"scan": [[1, 2], [3]]}\n')):
        (tmp_path / name).write_text(text)
        reader = RowReader(find_row_files([str(tmp_path / name)]), column)
        rows += _rows(reader, 1)
        reader.close()
    assert rows[0].values["scan"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(DataError, match=r"a\.jsonl, row 0, column 'scan': the value is not float32\[2,2\]"):
        GivenRows([rows[1].values], {"scan": "float32[2,2]"}, place=lambda number: "a.jsonl, row 0")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"n,text\n1,x\n2,y,z\n", r"a\.csv, row 1 \(line 3\): it has 3 values"),
        ("a.csv", b"n,text\n1,x\nmany,y\n", r"a\.csv, row 1 \(line 3\), column 'n': 'many' is not int64"),
        ("a.csv", b"n,text\n1.5,x\n", "'1.5' is not int64"),
        ("a.csv", b"n,n\n1,2\n", "line 1, column 'n': the column is there twice"),
        ("a.csv", b'n,text\n1,"x\n', r"a\.csv, row 0.*cannot be read"),
        ("a.csv", b"n,text\n1,\xc3\xa9\xff\n", "row 0.*cannot be read"),
        ("a.csv", b"x\n3\n", r"'3' is not float64\[\*\]"),
        ("a.jsonl", b'{"n": 1}\n{"n": \n', r"a\.jsonl, row 1 \(line 2\): the line is not JSON"),
        ("a.jsonl", b"[1]\n", r"row 0 \(line 1\): it is a list"),
        ("a.jsonl.gz", gzip.compress(b'{"n": 1}\n' * 9999)[:-9], "row .*cannot be read"),
        ("a.csv.gz", gzip.compress(b"n,text\n1," + b"x" * (1 << 18)), "row 0.*cannot be read.*a line has more than"),
        ("a.parquet", b"PAR1 nothing", "cannot be read"),
        ("a.arrow", b"", "cannot be read"),
    ],
)
def test_bad_rows_are_named(
    name: str, content: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_lib.data.rows.reading.MAX_LINE_BYTES", 1 << 17)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as refused:
        _rows(_reader(tmp_path / name), 100_000)
    assert re.search(words, str(refused.value)), str(refused.value)
    assert str(tmp_path / name) in str(refused.value)


def test_what_is_no_file_of_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "rows.parquet.gz").write_text("x")
    (tmp_path / "good.csv").write_text("n\n1\n")
    for address, words in (
        (tmp_path / "rows.txt", "format of this file is not known"),
        (tmp_path / "rows.parquet.gz", "format of this file is not known"),
        (tmp_path / "god.csv", "Did you mean good.csv"),
        (tmp_path / "*.parquet", "No file matches"),
        (tmp_path / "*.txt", "none of a known format"),
        ("hf://datasets/data", "names no repository"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_row_files([str(address)])
    with pytest.raises(ConfigError, match="given twice"):
        find_row_files([str(tmp_path / "good.csv"), str(tmp_path / "*.csv")])


def test_what_python_calls_json_is_read_whatever_reads_it(tmp_path: Path) -> None:
    lines = [
        '{"x": [NaN, -Infinity, 1e400]}',
        ' {"n": 1, "n": 2} ',
        '{"n": 18446744073709551615, "longer": 18446744073709551616}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(["", *lines, ""]))
    rows = [row.values for row in _rows(_reader(tmp_path / "a.jsonl"), 9)]
    assert str(rows) == str([json.loads(line) for line in lines])
    (tmp_path / "a.jsonl").write_text('{"text": "fine \\ud83d\\ude00"}\n{"text": "\\ud83d"}')
    with pytest.raises(DataError, match=r"a.jsonl, row 1 \(line 2\): a text has half of a surrogate pair"):
        _rows(_reader(tmp_path / "a.jsonl"), 9)


def test_the_id_of_a_row_whose_text_is_bad_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,n\na,1\nb,many\n")
    good, bad = _reader(tmp_path / "a.csv").take_all(9)
    assert (good.id, bad.id) == ("a", "b") and bad.place.endswith("a.csv, row 1 (line 3)")


VALUES: dict[str, Callable[[random.Random], Any]] = {
    "int64": lambda draw: draw.choice([0, -1, True, 2**53 + 1, 2**62]),
    "int8": lambda draw: draw.randrange(-128, 128),
    "uint64": lambda draw: draw.choice([0, 2**63, 2**64 - 1]),
    "bool": lambda draw: draw.choice([True, False, 1]),
    "float32": lambda draw: draw.choice([draw.random(), 1, True, 2**60 + 1, 1e300, -math.inf, 16777217]),
    "float64": lambda draw: draw.choice([draw.random(), 3, 2**53 + 1]),
    "string": lambda draw: draw.choice(["", "a", "é"]),
    "int64[*]": lambda draw: [draw.randrange(9) for _ in range(draw.randrange(1, 5))],
    "int32[*]": lambda draw: [draw.randrange(9) for _ in range(3)],
    "float32[*]": lambda draw: [draw.random() for _ in range(draw.randrange(4))],
    "float32[2,2]": lambda draw: np.full((2, 2), draw.random()),
    "string[*]": lambda draw: ["x"] * draw.randrange(3),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # 1e300 as a float32, in both ways
@pytest.mark.parametrize("kind", VALUES)
def test_rows_together_have_the_values_of_rows_alone(kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(20):
        rows = [{"v": VALUES[kind](draw)} for _ in range(draw.randrange(1, 12))]
        together, alone = GivenRows(rows, {"v": kind}), [GivenRows([row], {"v": kind})[0] for row in rows]
        assert len(together) == len(rows)
        for mine, expected in zip(together[:], alone, strict=True):
            assert type(mine["v"]) is type(expected["v"])
            assert getattr(mine["v"], "dtype", None) == getattr(expected["v"], "dtype", None)
            assert np.array_equal(mine["v"], expected["v"])
        assert str(together[-1]) == str(alone[-1])


def test_most_columns_are_converted_together() -> None:
    draw = random.Random(0)
    slow = {kind for kind in VALUES if convert_together([VALUES[kind](draw)] * 3, Column.parse(kind)) is None}
    assert slow <= {"float32", "float64", "string[*]"}  # great numbers, and texts


@pytest.mark.parametrize(
    ("kind", "good", "bad", "words"),
    [
        ("int64", 1, 1.5, "not int64 but float64"),
        ("int64", 1, "4", "not int64 but <U1"),
        ("int8", 1, 200, "does not fit into int8"),
        ("int64", 1, 2**70, "column 'v'"),
        ("float32", 1.0, None, "not float32"),
        ("float32", 1.0, [1.0], "the shape is"),
        ("string", "a", 1, "a value of type str is needed"),
        ("int64[*]", [1, 2], [[1], [2]], "an array of one dimension"),
        ("int64[*]", [1, 2], "12", "not int64"),
        ("int64[*]", [1], [], "not int64"),
        ("int64[*]", [1, 2], {1: 2}, "not int64"),
        ("float32[*]", [1.0], [1.0, "a"], "not float32"),
        ("float32[2,2]", [[1, 2], [3, 4]], [[1, 2]], "the shape is"),
    ],
)
def test_the_first_bad_row_among_good_ones_is_named(kind: str, good: Any, bad: Any, words: str) -> None:
    rows = [{"v": good}, {"v": good}, {"v": bad}, {"v": bad}]
    with pytest.raises(DataError, match=words) as refused:
        GivenRows(rows, {"v": kind}, names=["v"], place="file.jsonl, row {}".format)
    assert "file.jsonl, row 2, column 'v'" in str(refused.value)


def test_a_sample_may_be_changed_without_changing_the_row() -> None:
    rows = GivenRows(
        [{"v": [1.0, 2.0], "w": [1]}, {"v": [3.0, 4.0], "w": [2, 3]}], {"v": "float32[*]", "w": "int64[*]"}
    )
    for sample in (rows[0], *rows[:], *rows.__getitems__([1, 0])):
        sample["v"] *= 0
        sample["w"] *= 0
    assert [row["v"].tolist() for row in rows[:]] == [[1, 2], [3, 4]]
    assert [row["w"].tolist() for row in rows[:]] == [[1], [2, 3]]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (1, 7)])
def test_an_array_is_written_as_the_list_of_its_rows(dtype: str, shape: tuple[int, ...]) -> None:
    values: Any = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    if dtype.startswith("float"):
        values.reshape(-1)[0] = np.nan
    for array in (values, np.asfortranarray(values), np.repeat(values, 2, axis=0)[::2]):
        rows = pa.array(range(len(array)))
        table = build_table(rows, {"v": array}, rows=len(array), of="")
        expected = build_table(rows, {"v": list(array)}, rows=len(array), of="")
        assert table.schema == expected.schema and to_parquet(table) == to_parquet(expected)


def test_lists_of_unequal_lengths_are_a_column() -> None:
    spans: list[Any] = [[[1, 2], [3]], [[4]]]
    table = build_table(pa.array(range(2)), {"spans": spans}, rows=2, of="")
    assert table["spans"].to_pylist() == spans


def test_a_line_is_json_with_null_for_what_json_has_no_number_for(tmp_path: Path) -> None:
    parts = numbered_parts(Store.open(str(tmp_path)), "key", "jsonl")
    columns: dict[str, Any] = {"v": np.array([[0.1, np.nan], [np.inf, -0.0]]), "word": ["é\n", "\u2028"]}
    entry = write_row_predictions(parts, 0, ["a", None], columns, {}, text_ids=True)
    lines = (tmp_path / entry.path).read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {"row_id": "a", "v": [0.1, None], "word": "é\n"},
        {"row_id": None, "v": [None, -0.0], "word": "\u2028"},
    ]
    assert lines[-1] == ""
