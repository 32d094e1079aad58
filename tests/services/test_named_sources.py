"""Recipes by name read data by its address: on an object store, on a store in memory, and as a data set of the Hub."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.support import tiny
from tests.support.hub_server import HubServer
from tests.support.named_recipes import prepare_sources
from tests.support.s3 import S3Server
from trainer_lib.data.rows.row_files import read_rows
from trainer_lib.data.rows.row_sources import find_row_files
from trainer_lib.errors import ConfigError, DataError, StorageError, StoreUnreachableError
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.protocol.requests import PrepareRequest, RecipeFile
from trainer_lib.storage import Store
from trainflow.tasks.keys.sources import fingerprints

Put = Callable[[dict[str, bytes]], str]
NAME = "org/wine"
DATA = f"hf://datasets/{NAME}"
ROWS = [{"size": n, "kind": "big" if n > 20 else "small"} for n in range(40)]
CSV = b"size,kind\n" + b"".join(f"{row['size']},{row['kind']}\n".encode() for row in ROWS)
LINES = b"".join(f'{{"size": {row["size"]}, "kind": "{row["kind"]}"}}\n'.encode() for row in ROWS)
SPLIT = {"validation": 0.2, "test": 0.2}
TABLE: dict[str, Any] = {"label": "kind", "split": SPLIT}
IMAGES: dict[str, Any] = {"size": 8, "split": SPLIT}


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


@pytest.fixture(params=["s3_url", "memory_url", "hub"])
def put(request: pytest.FixtureRequest, s3_server: S3Server) -> Put:
    """Write files to a place, and return its address. Names the server, which must start before the police look."""
    place = request.getfixturevalue(request.param)

    def write(files: dict[str, bytes]) -> str:
        if isinstance(place, HubServer):
            place.add_dataset(NAME, files)
            return DATA
        for path, data in files.items():
            Store.open(place).write_bytes(path, data)
        return str(place)

    return write


@pytest.mark.parametrize("source", ["wine.csv", "wine.jsonl", "wine.parquet", "tables", "tables/**/*.csv", "*.csv"])
def test_a_table_is_read_from_its_address(source: str, put: Put, tmp_path: Path) -> None:
    files = {"wine.csv": CSV, "wine.jsonl": LINES, "wine.parquet": parquet(ROWS)}
    address = f"{put({**files, 'tables/deep/a.csv': CSV, 'tables/notes.md': b'not a table'})}/{source}"
    assert len(digest(address)) == 64
    _, splits, info = prepare_sources("tabular-classification", [address], TABLE, tmp_path)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 24, "validation": 8, "test": 8}
    assert info.info["classes"] == ["big", "small"]


def test_a_folder_of_images_is_read_from_its_address(put: Put, tmp_path: Path) -> None:
    shades = {"dark": 0, "light": 200}
    files = {f"shades/{kind}/{n}.png": png(shade + n) for kind, shade in shades.items() for n in range(10)}
    address = f"{put(files)}/shades"
    before = digest(address)
    _, splits, info = prepare_sources("image-classification", [address], IMAGES, tmp_path)
    assert sum(len(rows) for rows in splits.values()) == 20
    assert info.info["classes"] == ["dark", "light"]
    put({**files, "shades/light/0.png": png(100)})
    assert digest(address) != before


def test_a_table_names_images_beside_it(put: Put, tmp_path: Path) -> None:
    files = {f"photos/{n}.png": png(n if n % 2 else 200 + n) for n in range(20)}
    lines = [f"photos/{n}.png,{'dark' if n % 2 else 'light'}" for n in range(20)]
    root, options = (
        put({**files, "labels.csv": "\n".join(["photo,label", *lines]).encode()}),
        {**IMAGES, "image": "photo"},
    )
    sources = [f"{root}/labels.csv", f"{root}/photos"]
    _, splits, _ = prepare_sources("image-classification", sources, options, tmp_path)
    assert sum(len(rows) for rows in splits.values()) == 20
    put({"labels.csv": "\n".join(["photo,label", *lines, "photos/99.png,dark"]).encode(), **files})
    with pytest.raises(DataError, match=r"99\.png"):
        prepare_sources("image-classification", sources, options, tmp_path / "again")


def test_texts_are_documents(put: Put, tmp_path: Path) -> None:
    root = put({f"texts/{n}.txt": f"text number {n}, and more of it\n".encode() * 4 for n in range(12)})
    options = {"overlong": "split", "length": 32, "vocabulary": 300}
    _, splits, _ = prepare_sources("causal-language-modeling", [f"{root}/texts"], options, tmp_path)
    assert set(splits) == {"train", "validation", "test"}


def test_what_is_not_there_is_refused_with_the_nearest_name(put: Put, tmp_path: Path) -> None:
    root = put({"wine.csv": CSV})
    for path, words, remedy in (
        ("wime.csv", "nothing at this address", "URL"),
        ("w*.tsv", "No file matches", "pattern"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            digest(f"{root}/{path}")
        assert (caught.value.field, caught.value.value) == ("prepare.sources", f"{root}/{path}")
        assert remedy in (caught.value.remedy or "")
    with pytest.raises(ConfigError, match=r"Did you mean wine\.csv") as caught:
        prepare_sources("tabular-classification", [f"{root}/wime.csv"], TABLE, tmp_path)
    assert caught.value.field == "prepare.sources"


def test_a_worker_reads_with_the_credentials_of_the_environment_and_writes_none(
    s3_url: str, hub: HubServer, tmp_path: Path
) -> None:
    Store.open(s3_url).write_bytes("wine.csv", CSV)
    hub.add_dataset(NAME, {"wine.csv": CSV})
    recipe = RecipeFile(str(recipe_file("tabular-classification")), str(tmp_path))
    sources = (f"{s3_url}/wine.csv", f"{DATA}/wine.csv")
    asked = PrepareRequest(output=str(tmp_path / "out"), recipe=recipe, sources=sources, options=TABLE)
    splits = {name: split.rows for name, split in tiny.run(asked).splits.items()}
    assert splits == {"train": 48, "validation": 16, "test": 16}
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(hub.token.encode() in content for content in written)


def test_a_whole_repository_is_a_source_and_its_notes_are_none(hub: HubServer, tmp_path: Path) -> None:
    hub.add_dataset(NAME, {"wine.csv": CSV, "README.md": b"# Wine"})
    _, splits, _ = prepare_sources("tabular-classification", [f"{DATA}@main"], TABLE, tmp_path)
    assert len(splits["train"]) == 24


def test_a_file_counts_by_its_content_and_not_by_its_neighbours(hub: HubServer) -> None:
    first = hub.add_dataset(NAME, {"a.csv": CSV, "big/b.parquet": b"PAR1"})
    file, folder, pattern = digest(f"{DATA}/a.csv"), digest(DATA), digest(f"{DATA}/*.csv")
    fixed = digest(f"{DATA}@{first.sha}/a.csv")
    hub.add_dataset(NAME, {"a.csv": CSV, "big/b.parquet": b"PAR2", "README.md": b"new"})
    assert (digest(f"{DATA}/a.csv"), digest(f"{DATA}/*.csv")) == (file, pattern)
    assert digest(DATA) != folder
    large = digest(f"{DATA}/big/b.parquet")
    hub.add_dataset(NAME, {"a.csv": CSV, "b.csv": CSV, "big/b.parquet": b"PAR3"})
    assert digest(f"{DATA}/*.csv") != pattern
    assert digest(f"{DATA}/big/b.parquet") != large
    hub.add_dataset(NAME, {"a.csv": CSV + b"41,big\n"})
    assert digest(f"{DATA}/a.csv") != file
    assert digest(f"{DATA}@{first.sha}/a.csv") == fixed  # a commit stays what it is
    assert not [path for _, path in hub.requests if "/resolve/" in path]  # nothing was downloaded


def test_a_large_file_is_read_in_ranges_and_a_folder_is_listed_once(hub: HubServer, tmp_path: Path) -> None:
    lines = (b'{"n": %d, "text": "%0200d"}\n' % (n, n) for n in range(60_000))
    images = {f"images/{kind}/{n}.png": png(n) for kind in ("dark", "light") for n in range(10)}
    hub.add_dataset(NAME, {"rows.jsonl": b"".join(lines), **images})
    read = [values["n"] for _, values in read_rows(find_row_files([f"{DATA}/rows.jsonl"]))]
    assert read == list(range(60_000))
    assert len([path for _, path in hub.requests if "/resolve/" in path]) > 1
    hub.requests.clear()
    prepare_sources("image-classification", [f"{DATA}/images"], IMAGES, tmp_path)
    assert len([path for _, path in hub.requests if "/tree/" in path]) <= 4  # not one for each image


@pytest.mark.parametrize(
    ("source", "words", "remedy"),
    [
        ("hf://datasets/org/wino/a.csv", "no such repository", "HF_TOKEN"),
        (f"{DATA}@newest/a.csv", "no such revision", "branch, a tag or a commit"),
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


def test_a_hub_that_refuses_or_does_not_answer_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_dataset(NAME, {"a.csv": CSV})
    hub.fault = lambda method, path: 403 if "/resolve/" in path else None
    with pytest.raises(ConfigError, match="403") as refused:
        list(read_rows(find_row_files([f"{DATA}/a.csv"])))
    assert "HF_TOKEN" in (refused.value.remedy or "")
    hub.fault = lambda method, path: 503
    with pytest.raises(StoreUnreachableError, match=r"out of order \(503\)"):
        digest(f"{DATA}/a.csv")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreUnreachableError, match="Connection refused") as caught:
        digest(f"{DATA}/a.csv")
    assert "HF_ENDPOINT" in (caught.value.remedy or "")
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
