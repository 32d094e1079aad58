"""Data by its name on the Hub: what it counts by, how recipes by name read it, and what is refused."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tasks.stage.sources import fingerprints
from tests.support.hub_server import HubServer
from tests.support.named_recipes import prepare_sources
from trainer_lib.data.row_files import read_rows
from trainer_lib.data.row_sources import find_row_files
from trainer_lib.errors import ConfigError, StorageError, StoreUnreachableError
from trainer_lib.storage import Store

NAME = "org/wine"
DATA = f"hf://datasets/{NAME}"
CSV = b"size,kind\n" + b"".join(b"%d,%s\n" % (n, b"big" if n > 20 else b"small") for n in range(40))


def digest(source: str) -> str:
    [found] = fingerprints([source])
    assert found["source"] == source
    return found["digest"]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), written)
    return written.getvalue()


def png(shade: int) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, shade, shade)).save(written, "PNG")
    return written.getvalue()


def test_a_file_counts_by_its_content_and_not_by_its_neighbours(hub: HubServer) -> None:
    first = hub.add_dataset(NAME, {"a.csv": CSV, "big/b.parquet": b"PAR1"})
    file, folder = digest(f"{DATA}/a.csv"), digest(DATA)
    fixed = digest(f"{DATA}@{first.sha}/a.csv")
    hub.add_dataset(NAME, {"a.csv": CSV, "big/b.parquet": b"PAR2", "README.md": b"new"})
    assert digest(f"{DATA}/a.csv") == file
    assert digest(DATA) != folder
    large = digest(f"{DATA}/big/b.parquet")
    hub.add_dataset(NAME, {"a.csv": CSV + b"41,big\n", "big/b.parquet": b"PAR3"})
    assert digest(f"{DATA}/a.csv") != file
    assert digest(f"{DATA}/big/b.parquet") != large
    assert digest(f"{DATA}@{first.sha}/a.csv") == fixed  # a commit stays what it is
    assert not [path for _, path in hub.requests if "/resolve/" in path]  # nothing was downloaded


def test_a_pattern_counts_by_the_files_that_match(hub: HubServer) -> None:
    hub.add_dataset(NAME, {"data/a.csv": CSV, "data/notes.txt": b"1"})
    before = digest(f"{DATA}/data/*.csv")
    hub.add_dataset(NAME, {"data/a.csv": CSV, "data/notes.txt": b"2"})
    assert digest(f"{DATA}/data/*.csv") == before
    hub.add_dataset(NAME, {"data/a.csv": CSV, "data/b.csv": CSV})
    assert digest(f"{DATA}/data/*.csv") != before


@pytest.mark.parametrize("source", ["wine.csv", "wine.jsonl", "wine.parquet", "tables", "tables/**/*.csv", ""])
def test_a_recipe_by_name_reads_a_data_set_by_name(source: str, hub: HubServer, tmp_path: Path) -> None:
    rows = [{"size": n, "kind": "big" if n > 20 else "small"} for n in range(40)]
    lines = "".join(f'{{"size": {row["size"]}, "kind": "{row["kind"]}"}}\n' for row in rows).encode()
    files = {"wine.csv": CSV, "wine.jsonl": lines, "wine.parquet": parquet(rows), "tables/deep/a.csv": CSV}
    hub.add_dataset(NAME, {path: data for path, data in files.items() if source in path or "/" in source})
    address = f"{DATA}/{source}".rstrip("/") if source else f"{DATA}@main"
    options = {"label": "kind", "split": {"validation": 0.2, "test": 0.2}}
    if not source:
        hub.add_dataset(NAME, {"wine.csv": CSV, "README.md": b"# Wine"})
    _, splits, info = prepare_sources("tabular-classification", [address], options, tmp_path)
    assert {name: len(each) for name, each in splits.items()} == {"train": 24, "validation": 8, "test": 8}
    assert info.info["classes"] == ["big", "small"]


def test_a_large_file_is_read_in_ranges(hub: HubServer) -> None:
    lines = (b'{"n": %d, "text": "%0200d"}\n' % (n, n) for n in range(60_000))
    hub.add_dataset(NAME, {"rows.jsonl": b"".join(lines)})
    read = [values["n"] for _, values in read_rows(find_row_files([f"{DATA}/rows.jsonl"]))]
    assert read == list(range(60_000))
    assert len([path for _, path in hub.requests if "/resolve/" in path]) > 1


def test_a_folder_of_images_on_the_hub_is_a_source(hub: HubServer, tmp_path: Path) -> None:
    images = {f"{kind}/{n}.png": png(shade + n) for kind, shade in (("dark", 0), ("light", 200)) for n in range(10)}
    hub.add_dataset(NAME, {f"images/{path}": data for path, data in images.items()})
    options = {"size": 8, "split": {"validation": 0.2, "test": 0.2}}
    _, splits, info = prepare_sources("image-classification", [f"{DATA}/images"], options, tmp_path)
    assert sum(len(each) for each in splits.values()) == 20
    assert info.info["classes"] == ["dark", "light"]
    listings = [path for _, path in hub.requests if "/tree/" in path]
    assert len(listings) <= 4  # not one for each image


def test_texts_of_a_data_set_are_documents(hub: HubServer, tmp_path: Path) -> None:
    hub.add_dataset(NAME, {f"texts/{n}.txt": f"text number {n}, and more of it\n".encode() * 4 for n in range(12)})
    options = {"overlong": "split", "length": 32, "vocabulary": 300}
    _, splits, _ = prepare_sources("causal-language-modeling", [f"{DATA}/texts"], options, tmp_path)
    assert set(splits) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("source", "words", "remedy"),
    [
        ("hf://datasets/org/wino/a.csv", "no such repository", "HF_TOKEN"),
        (f"{DATA}@newest/a.csv", "no such revision", "branch, a tag or a commit"),
        (f"{DATA}/b.csv", "nothing at this address", "URL"),
        (f"{DATA}/b*.csv", "No file matches", "pattern"),
        ("hf://datasets/wine", "names no repository", "hf://datasets/organisation/name"),
        ("hf://datasets/org/*/a.csv", "names no repository", "hf://datasets/organisation/name"),
    ],
)
def test_what_is_not_on_the_hub_is_refused_in_the_plan(source: str, words: str, remedy: str, hub: HubServer) -> None:
    hub.add_dataset(NAME, {"a.csv": CSV})
    with pytest.raises(ConfigError, match=words) as caught:
        digest(source)
    assert caught.value.field == "prepare.sources"
    assert source.startswith(str(caught.value.value))  # the whole source, or its repository
    assert remedy in (caught.value.remedy or "")


def test_a_file_that_is_not_there_is_refused_with_the_nearest_name(hub: HubServer, tmp_path: Path) -> None:
    hub.add_dataset(NAME, {"wine.csv": CSV})
    with pytest.raises(ConfigError, match=r"Did you mean wine\.csv") as caught:
        prepare_sources("tabular-classification", [f"{DATA}/wime.csv"], {"label": "kind"}, tmp_path)
    assert caught.value.field == "prepare.sources"


@pytest.mark.parametrize("token", [None, "hf_" + "w" * 30])
def test_a_reader_without_authorisation_is_refused(
    token: str | None, hub_server: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub_server.add_dataset(NAME, {"a.csv": CSV})
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ConfigError) as caught:
        digest(f"{DATA}/a.csv")
    assert caught.value.field == "prepare.sources"
    assert "HF_TOKEN" in (caught.value.remedy or "")
    assert token is None or token not in f"{caught.value} {caplog.text}"
    monkeypatch.setenv("HF_TOKEN", hub_server.token)  # the next look is with the token that is there now
    assert digest(f"{DATA}/a.csv")


def test_a_gated_file_names_the_token(hub: HubServer) -> None:
    hub.add_dataset(NAME, {"a.csv": CSV})
    hub.fault = lambda method, path: 403 if "/resolve/" in path else None
    with pytest.raises(ConfigError, match="403") as caught:
        list(read_rows(find_row_files([f"{DATA}/a.csv"])))
    assert "HF_TOKEN" in (caught.value.remedy or "")


def test_a_hub_that_does_not_answer_can_be_asked_again(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_dataset(NAME, {"a.csv": CSV})
    hub.fault = lambda method, path: 503
    with pytest.raises(StoreUnreachableError, match=r"out of order \(503\)"):
        digest(f"{DATA}/a.csv")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreUnreachableError, match="the connection is refused") as caught:
        digest(f"{DATA}/a.csv")
    assert "HF_ENDPOINT" in (caught.value.remedy or "")


def test_the_offline_mode_of_the_client_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        digest(f"{DATA}/a.csv")


def test_nothing_is_written_to_a_repository_as_if_it_were_a_folder(hub: HubServer) -> None:
    hub.add_dataset(NAME, {"a.csv": CSV})
    store = Store.open(DATA)
    with pytest.raises(ConfigError, match="only read"):
        store.ensure_writable()
    for write in (
        lambda: store.write_bytes("b", b""),
        lambda: store.create("b", b""),
        lambda: store.delete("a.csv"),
        lambda: store.delete_tree(),
    ):
        with pytest.raises(StorageError, match="only read"):
            write()
    assert len(hub.repos[f"datasets/{NAME}"].commits) == 1
