"""Which addresses and which paths are accepted, and what is said of the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.storage import Store, relative_problem


@pytest.mark.parametrize(
    "rel", ["/etc/passwd", "../x", "a/../x", "a//x", "a/", "./x", "a\\x", "a\0", "a\nb", ".", "x/.."]
)
def test_a_path_that_could_lead_outside_is_refused_everywhere(rel: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    assert relative_problem(rel)
    for use in (
        store.read_bytes,
        store.exists,
        store.child,
        store.delete,
        store.open_read,
        store.local_path,
        store.list,
    ):
        with pytest.raises(ConfigError, match="A path inside a store"):
            use(rel)
    for write in (store.write_bytes, store.create):
        with pytest.raises(ConfigError, match="A path inside a store"):
            write(rel, b"")


@settings(max_examples=50)
@given(st.text(max_size=30))
def test_an_accepted_path_stays_inside(rel: str) -> None:
    if relative_problem(rel) is None:
        inside = os.path.normpath(os.path.join("/root/store", rel))  # noqa: PTH118
        assert inside.startswith("/root/store/")
        assert inside == f"/root/store/{rel}"


def test_local_folders_by_any_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (tmp_path / "s", "s", "./s", f"file://{tmp_path}/s", f"local://{tmp_path}/s", f"{tmp_path}/s/"):
        store = Store.open(url)
        assert store.url == str(tmp_path / "s")
        assert store.is_local
        assert store.local_path("a") == tmp_path / "s" / "a"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.open("~/s").url == str(tmp_path / "s")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("a\0b", "empty"),
        ("ss3://bucket/x", "Unknown URL scheme 'ss3'"),
        ("s3://", "no bucket"),
        ("s3://bucket/../x", r"'\.\.'"),
        ("file://relative/x", "absolute path"),
        ("simplecache::s3://bucket/x", "Chained"),
        ("s3://bucket/x::memory://y", "Chained"),
    ],
)
def test_a_wrong_url_is_refused_by_the_field_it_came_from(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Store.open(url, field="publish.target")
    assert caught.value.field == "publish.target"


def test_a_near_miss_is_told_the_right_scheme() -> None:
    with pytest.raises(ConfigError) as caught:
        Store.open("memroy://x")
    assert "Did you mean memory://" in str(caught.value.remedy)


@pytest.mark.parametrize("url", ["s3://key:s3cr3t@bucket/x", "s3://bucket/x?X-Amz-Signature=s3cr3t", "gs://b/x#s3cr3t"])
def test_secrets_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="must not carry credentials") as caught:
        Store.open(url)
    assert "s3cr3t" not in str(caught.value.to_record())


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = sys.modules["fsspec.registry"]._registry  # the package hides the module behind a name
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(registered, "s3", raising=False)
    with pytest.raises(MissingExtraError) as caught:
        Store.open("s3://bucket/x", field="storage")
    assert caught.value.remedy == 'Install it: pip install "trainflow[s3]".'
    assert caught.value.field == "storage"


def test_a_remote_store_has_no_local_path(memory_url: str) -> None:
    store = Store.open(memory_url)
    assert not store.is_local
    assert store.free_bytes() is None
    with pytest.raises(ConfigError, match="must be a local folder"):
        store.local_path()
