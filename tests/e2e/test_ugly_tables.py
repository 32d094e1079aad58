"""Files as people have them, each from `trainflow init --from FILE` to the report without a line of Python."""

from __future__ import annotations

import gzip
import json
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.model_folders import code_is_removed as code_is_removed
from tests.support.runs import run
from trainer_lib import load_model
from trainer_lib.data.rows.row_files import read_rows
from trainer_lib.data.rows.row_sources import find_row_files
from trainflow.flows.cli.main import main
from trainflow.flows.records.results import PipelineResult

ROWS = 90
SMALL = (
    *("train.args.num_train_epochs=2", "evaluate.resamples=100", "publish.enabled=false"),
    *("tracking.enabled=false", "evaluate.launch=in_process", "predict.launch=in_process"),
)


@dataclass(frozen=True)
class Ugly:
    """A file, and what becomes of it.

    Attributes:
        write: writes it into a folder, and returns what is given as `--from`.
        metric: of the split test, which is measured.
        words: parts of the spec that is written.
        settings: what a user corrects in it, as words of the command.
        label: as `--label`; empty: it is guessed.
        new: a new row as its file has it, which the model predicts.
        ids: the form of the ids of predictions.
    """

    write: Callable[[Path], str]
    metric: str
    words: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    label: str = ""
    new: Mapping[str, Any] = field(default_factory=dict)
    ids: str = r"\d+"


def _file(name: str, head: str, line: Callable[[int], str], encoding: str = "utf-8") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "\r\n".join([head, *map(line, range(ROWS)), ""])
        content = text.encode(encoding)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return write


def _churn(row: int) -> str:
    money = "N/A" if row % 9 == 4 else f"${1000 + 37 * row:,}.52"
    when = f"{1 + row % 28:02}/{1 + row % 12:02}/{2019 + row % 3}"
    return (
        f"K-{row:03};{money};{when};{('Köln', 'köln ', 'Graz')[row % 3]};{row % 7 * 5} %;{'nein' if row % 3 else 'ja'}"
    )


def _survey(row: int) -> str:
    chosen = [name for name, every in (("price", 2), ("quality", 3), ("service, staff", 5)) if row % every == 0]
    return f'{row},{18 + row % 60},{("daily", "weekly")[row % 2]},"{"; ".join(chosen)}"'


def _ticket(row: int) -> str:
    words = (
        "cannot <b>log in</b>, the page says &quot;error&quot;",
        "have an old invoice",
        "want <a href='x'>more</a>",
    )
    return f'T-{row},"<p>Hello no. {row},\nI {words[row % 3]} &amp; {row * 7919 % 97} more<br/></p>",{row % 3 + 1}'


def _sale(row: int) -> str:
    return f"{row % 7},{('a', 'b', 'c')[row % 3]},{'yes' if row % 2 else 'no'}"


def _price(row: int) -> str:
    return f'{row:05};{10115 + row % 9};{50 + row % 40};"{1 + row % 4}.{100 + row},50 €"'


def _partitions(folder: Path) -> str:
    for year in (2022, 2023):
        _file(f"sales/year={year}/part-0.csv.gz", "amount,kind,returned", _sale)(folder)
    (folder / "sales" / "_SUCCESS").write_bytes(b"")
    return str(folder / "sales")


def _images(folder: Path) -> str:
    for row in range(ROWS // 3):
        kind = folder / "photos" / ("dark", "light")[row % 2]
        kind.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12 + row % 5, 12), (200 * (row % 2) + row,) * 3).save(kind / f"{row}.png")
    for name in (".DS_Store", "dark/Thumbs.db", "light/._1.png"):
        (folder / "photos" / name).write_bytes(b"\0")
    (folder / "photos" / "__MACOSX" / "dark").mkdir(parents=True)
    (folder / "photos" / "__MACOSX" / "dark" / "._0.png").write_bytes(b"\0")
    return str(folder / "photos")


def _workbook(folder: Path) -> str:
    (folder / "orders.xlsx").write_bytes(b"PK")
    return str(folder / "orders.xlsx")


class _Book:
    """A workbook of two sheets as openpyxl gives it; the package is an extra."""

    sheetnames = ("About", "Orders")

    def __getitem__(self, name: str) -> Any:
        cells: list[tuple[Any, ...]] = [("Exported by the shop", None, None, None)]
        if name == "Orders":
            cells = []
            rows = [(f"O{row}", 5.5 * (row % 8), row % 2 == 0, ("paid", "open")[row % 2]) for row in range(ROWS)]
            cells += [("order", "amount", "gift", "state"), *rows, (None,) * 4]
        return types.SimpleNamespace(iter_rows=lambda min_row, values_only: iter(cells[min_row - 1 :]))


CASES: dict[str, Ugly] = {
    "churn": Ugly(
        _file("kunden.csv", "Kunde Nr;Umsatz;Seit;Stadt;Anteil;Gekündigt", _churn, "latin-1"),
        "accuracy_over_majority",
        words=('id: "Kunde Nr"', "cp1252", "dates: {Seit: null}", "merge: [Stadt]", "missing: mean"),
        new={"Kunde Nr": "K-900", "Umsatz": "N/A", "Seit": "18/02/2020", "Stadt": "KÖLN", "Anteil": "5 %"},
        ids=r"K-\d{3}",
    ),
    "survey": Ugly(
        _file("survey.csv", "nr,age,often,reasons", _survey),
        "average_precision_over_chance",
        words=("target: several", 'label_separator: ";"'),
        new={"nr": 1, "age": 30, "often": "daily"},
    ),
    "orders with sheets": Ugly(
        _workbook,
        "accuracy_over_majority",
        words=("the first sheet with rows is read, 'Orders'", "id: order"),
        new={"order": "x", "amount": 3, "gift": True},
        ids=r"O\d+",
    ),
    "tickets with HTML": Ugly(
        _file("tickets.csv", "ticket,body,priority", _ticket),
        "rank_mae_below_median",
        words=("hashed: {body: 64}", "target: order"),
        settings=("prepare.options.target=order",),
        new={"ticket": "x", "body": "<p>Hello</p>"},
        ids=r"T-\d+",
    ),
    "images with hidden files": Ugly(_images, "accuracy_over_majority", words=("dark (15), light (15)",)),
    "packed partitions": Ugly(
        _partitions,
        "accuracy_over_majority",
        words=("name columns that are not read (prepare.options.read.partitions=true)",),
        settings=("prepare.options.read={partitions: true}",),
        new={"amount": 3, "kind": "a", "year": 2022},
    ),
    "digits and commas": Ugly(
        _file("houses.csv", "id;postcode;area;price", _price),
        "rmse_below_mean",
        words=("recipe: tabular-regression",),
        settings=("prepare.options.categorical=[postcode]",),
        new={"id": "00900", "postcode": "10115", "area": "70"},
        ids=r"\d{5}",
    ),
}  # fmt: skip


def made(folder: Path, ugly: Ugly, capsys: pytest.CaptureFixture[str]) -> tuple[str, PipelineResult]:
    """The spec that init writes for the file, and its run."""
    label = ["--label", ugly.label] if ugly.label else []
    with pytest.raises(SystemExit) as ended:
        main(["init", str(folder / "project"), "--from", ugly.write(folder), *label, "--quiet"])
    assert ended.value.code == 0, capsys.readouterr().err
    return (folder / "project" / "pipeline.yaml").read_text(), run(folder / "project", *SMALL, *ugly.settings)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_a_model_and_a_report_without_a_line_of_python(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = types.SimpleNamespace(load_workbook=lambda stream, **how: _Book())
    monkeypatch.setitem(sys.modules, "openpyxl", book)
    ugly = CASES[name]
    spec, result = made(tmp_path, ugly, capsys)
    result.raise_for_error()
    assert [words for words in ugly.words if words not in spec] == []
    storage = tmp_path / "project" / ".trainflow"
    [metrics] = storage.glob("stages/evaluate/*/metrics.json")
    assert ugly.metric in json.loads(metrics.read_text())["test"]
    [report] = storage.glob("runs/*/report.html")
    assert ugly.metric in report.read_text()
    predicted = find_row_files([str(path) for path in storage.glob("stages/predict/*/predictions/test/*.parquet")])
    rows = [row for _, row in read_rows(predicted)]
    assert rows
    assert [row["row_id"] for row in rows if not re.fullmatch(ugly.ids, str(row["row_id"]))] == []
    if ugly.new:
        [model] = storage.glob("stages/train/*")
        assert len(load_model(str(model)).predict([ugly.new])["prediction"]) == 1
