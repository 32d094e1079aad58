"""Documents of text files and tables: where each is from, in which split it is, and what is refused."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.errors import TrainflowError
from trainer_lib.recipes.packing import Document, new_counts, pack_documents
from trainer_lib.recipes.text_documents import DocumentSplits, TextDocument, read_documents

OPTIONS: dict[str, Any] = {"text": "text", "rename": {}, "separator": None, "files": {}, "split": {}}


def read(*sources: str | Path, **more: Any) -> list[TextDocument]:
    settings = {"rename": {}, "separator": None, "field": "prepare.sources", **more}
    return list(read_documents([str(each) for each in sources], **settings))


def refused(*sources: str | Path, **more: Any) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        read(*sources, **more)
    assert caught.value.remedy
    return caught.value


def write_lines(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_text_files_and_rows_are_documents_in_the_order_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "empty.py").write_text("\n \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    rows = write_lines(tmp_path, {"body": "third", "day": 1})
    found = read(tmp_path / "a.md", tmp_path / "b.txt", rows, rename={"body": "text"})
    assert [each.text for each in found] == ["first", "second\n", "third"]
    assert found[2].values == {"day": 1}
    assert found[0].place.endswith("/a.md")
    assert found[2].place.endswith("rows.jsonl, row 0 (line 1)")
    assert [each.text for each in read(tmp_path, text="body")] == ["first", "second\n", "third"]


def test_a_separator_cuts_a_file_into_documents(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("one\n\ntwo\n\n\n\nthree")
    found = read(tmp_path / "all.txt", separator="\n\n")
    assert [each.text for each in found] == ["one", "two", "three"]
    assert found[2].place.endswith("all.txt, document 3")


def test_installed_texts_are_sources(tmp_path: Path) -> None:
    library = {Path(each.place).name for each in read("stdlib:json")}
    assert {"decoder.py", "encoder.py"} <= library
    assert [Path(each.place).name for each in read("stdlib:colorsys.py")] == ["colorsys.py"]
    assert any(each.place.endswith("METADATA") or each.text for each in read("package:tqdm"))
    assert "not installed" in refused("package:nothing-of-this-name").message
    assert "There are no texts here" in refused("package:tqdm/nowhere").message


def test_bad_texts_are_refused_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    assert "latin.txt: the file is not UTF-8" in refused(tmp_path / "latin.txt").message
    rows = write_lines(tmp_path, {"text": "x"}, {"text": " "})
    assert "row 1 (line 2), column 'text': the text is empty" in refused(rows).message
    assert refused(rows, text="texts").remedy == 'Did you mean "text"?'
    assert "column 'text': a number is not a text" in refused(write_lines(tmp_path, {"text": 3})).message
    assert "there is no text" in refused(write_lines(tmp_path, {"text": None})).message
    (tmp_path / "sheet.xlsx").write_bytes(b"")
    error = refused(tmp_path / "sheet.xlsx")
    assert error.field == "prepare.sources"
    assert ".txt" in str(error.remedy)
    assert "nothing to read" in refused().message


def splits(*sources: Path, **options: Any) -> dict[str, list[str]]:
    found = DocumentSplits({**OPTIONS, **options}, [str(each) for each in sources])
    return {name: [each.text for each in found.read(name)] for name in found.names}


def test_splits_are_cut_at_random_by_group_and_by_time(tmp_path: Path) -> None:
    rows = write_lines(
        tmp_path, *({"text": f"t{number}", "book": number // 5, "day": str(20 - number)} for number in range(20))
    )
    shares = {"validation": 0.1, "test": 0.2}
    drawn = splits(rows, split=shares)
    assert {name: len(each) for name, each in drawn.items()} == {"train": 14, "validation": 2, "test": 4}
    assert sorted(text for each in drawn.values() for text in each) == sorted(f"t{number}" for number in range(20))
    assert drawn == splits(rows, split=shares)
    assert drawn != splits(rows, split={**shares, "seed": 1})
    books = splits(rows, split={**shares, "by": "group", "column": "book"})
    assert {len({int(text[1:]) // 5 for text in each} & {int(text[1:]) // 5 for text in books["train"]})
            for name, each in books.items() if name != "train"} == {0}  # fmt: skip
    assert splits(rows, split={**shares, "by": "time", "column": "day"})["test"] == ["t0", "t1", "t2", "t3"]
    with pytest.raises(TrainflowError, match="no classes"):
        splits(rows, split={"by": "stratified"})
    with pytest.raises(TrainflowError, match="no such column") as caught:
        splits(rows, split={"by": "time", "column": "days"})
    assert caught.value.remedy == 'Did you mean "day"?'


def test_splits_may_be_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    found = splits(files={"test": tmp_path / "b.txt", "train": tmp_path / "a.txt"})
    assert found == {"train": ["a"], "test": ["b"]}
    assert list(found) == ["train", "test"]
    with pytest.raises(TrainflowError, match="no split 'train'"):
        splits(files={"test": tmp_path / "b.txt"})


def test_the_standard_library_fills_its_rows() -> None:
    """Four bytes are about a token; `benchmarks.packing` takes a tokenizer's."""
    sizes = [len(each.text) // 4 for each in read("stdlib:")]
    assert len(sizes) > 400, sysconfig.get_path("stdlib")
    import numpy as np

    counts = new_counts()
    documents = (Document("", np.zeros(size, np.int32)) for size in sizes)
    for _ in pack_documents(documents, length=1024, overlong="split", packed=True, counts=counts):
        pass
    assert counts["tokens_lost"] == 0
    assert counts["padding"] < 0.005 * counts["rows"] * 1024
