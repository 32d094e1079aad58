"""Recipes by name read their data from URLs: an object store, a store in memory, and in a worker of their own."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from tasks.stage.sources import fingerprints
from tests.support import tiny
from tests.support.hub_server import HubServer
from tests.support.named_recipes import prepare_sources
from tests.support.s3 import S3Server
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipe_names import recipe_file
from trainer_lib.requests import PrepareRequest, RecipeFile
from trainer_lib.storage import Store

CSV = b"size,kind\n" + b"".join(b"%d,%s\n" % (n, b"big" if n > 20 else b"small") for n in range(40))
TABLE = {"label": "kind", "split": {"validation": 0.2, "test": 0.2}}
IMAGES = {"size": 8, "split": {"validation": 0.2, "test": 0.2}}


def png(shade: int) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, shade, shade)).save(written, "PNG")
    return written.getvalue()


@pytest.fixture(params=["s3_url", "memory_url"])
def place(request: pytest.FixtureRequest, s3_server: S3Server) -> Store:
    """An empty folder on a store. Names the server, which must start before the leak police looks."""
    return Store.open(request.getfixturevalue(request.param))


@pytest.mark.parametrize("source", ["wine.csv", "days", "days/**/*.csv", "*.csv"])
def test_a_table_is_read_from_a_store(source: str, place: Store, tmp_path: Path) -> None:
    place.write_bytes("wine.csv" if source.endswith("e.csv") or source == "*.csv" else "days/one/wine.csv", CSV)
    place.write_bytes("days/one/notes.md", b"not a table")
    address = f"{place.url}/{source}"
    assert len(fingerprints([address])[0]["digest"]) == 64
    _, splits, info = prepare_sources("tabular-classification", [address], TABLE, tmp_path)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 24, "validation": 8, "test": 8}
    assert info.info["classes"] == ["big", "small"]


def test_a_folder_of_images_is_read_from_a_store(place: Store, tmp_path: Path) -> None:
    for kind, shade in (("dark", 0), ("light", 200)):
        for n in range(10):
            place.write_bytes(f"shades/{kind}/{n}.png", png(shade + n))
    address = f"{place.url}/shades"
    before = fingerprints([address])
    _, splits, info = prepare_sources("image-classification", [address], IMAGES, tmp_path)
    assert sum(len(rows) for rows in splits.values()) == 20
    assert info.info["classes"] == ["dark", "light"]
    place.write_bytes("shades/light/0.png", png(100))
    assert fingerprints([address]) != before


def test_a_table_on_a_store_names_images_beside_it(place: Store, tmp_path: Path) -> None:
    lines = ["photo,label"]
    for n in range(20):
        place.write_bytes(f"photos/{n}.png", png(n if n % 2 else 200 + n))
        lines.append(f"photos/{n}.png,{'dark' if n % 2 else 'light'}")
    place.write_bytes("labels.csv", "\n".join(lines).encode())
    sources = [f"{place.url}/labels.csv", f"{place.url}/photos"]
    _, splits, _ = prepare_sources("image-classification", sources, {**IMAGES, "image": "photo"}, tmp_path)
    assert sum(len(rows) for rows in splits.values()) == 20
    place.delete("photos/7.png")
    with pytest.raises(DataError, match=r"7\.png"):
        prepare_sources("image-classification", sources, {**IMAGES, "image": "photo"}, tmp_path / "again")


def test_texts_are_read_from_a_store(place: Store, tmp_path: Path) -> None:
    for n in range(12):
        place.write_bytes(f"texts/{n}.txt", f"text number {n}, and more of it\n".encode() * 4)
    options = {"overlong": "split", "length": 32, "vocabulary": 300}
    _, splits, _ = prepare_sources("causal-language-modeling", [f"{place.url}/texts"], options, tmp_path)
    assert set(splits) == {"train", "validation", "test"}


def test_what_is_not_on_the_store_is_refused(place: Store, tmp_path: Path) -> None:
    place.write_bytes("wine.csv", CSV)
    with pytest.raises(ConfigError, match="nothing at this address"):
        fingerprints([f"{place.url}/wime.csv"])
    with pytest.raises(ConfigError, match="No file matches"):
        fingerprints([f"{place.url}/*.parquet"])
    with pytest.raises(ConfigError, match=r"Did you mean wine\.csv") as caught:
        prepare_sources("tabular-classification", [f"{place.url}/wime.csv"], TABLE, tmp_path)
    assert caught.value.field == "prepare.sources"


def _prepared_by_a_worker(source: str, folder: Path) -> dict[str, int]:
    recipe = RecipeFile(str(recipe_file("tabular-classification")), str(folder))
    asked = PrepareRequest(output=str(folder / "out"), recipe=recipe, sources=(source,), options=TABLE)
    return {name: split.rows for name, split in tiny.run(asked).splits.items()}


def test_a_worker_reads_with_the_credentials_of_the_environment(s3_url: str, tmp_path: Path) -> None:
    Store.open(s3_url).write_bytes("wine.csv", CSV)
    assert _prepared_by_a_worker(f"{s3_url}/wine.csv", tmp_path) == {"train": 24, "validation": 8, "test": 8}


def test_a_worker_reads_from_the_hub_with_the_token_of_the_environment(hub: HubServer, tmp_path: Path) -> None:
    hub.add_dataset("org/wine", {"wine.csv": CSV})
    source = "hf://datasets/org/wine/wine.csv"
    assert _prepared_by_a_worker(source, tmp_path) == {"train": 24, "validation": 8, "test": 8}
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(hub.token.encode() in content for content in written)
