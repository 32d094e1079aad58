"""Publishing to a server that speaks the Hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from tests.support.hub_server import Blob, HubServer, ImpatientTime
from tests.support.publishing import publish
from trainer_lib.errors import ConfigError, DamagedError, StorageError
from trainer_lib.hub.base import Content, Published, Source
from trainer_lib.hub.folder import open_hub
from trainer_lib.storage import Store

REPO = "org/digits"
README = b"---\nlicense: apache-2.0\n---\n# Digits\n"


def _content(folder: Path | str, weights: bytes = b"w" * 3_000_000, **more: bytes) -> Content:
    store = Store.open(folder)
    files = {
        path: Source(store, store.write_bytes(path, data))
        for path, data in {"model.safetensors": weights, "config.json": b"{}", **more}.items()
    }
    return Content(files, {"README.md": README}, {"run": os.urandom(4).hex()})


def _push(content: Content, message: str = "first", **more: Any) -> Published:
    return publish(f"hf://{REPO}", content, message=message, **more)


def _summaries(hub: HubServer) -> list[str]:
    return [commit.summary for commit in hub.repos[REPO].commits]


def test_what_is_published_comes_back_byte_for_byte(hub: HubServer, tmp_path: Path) -> None:
    content = _content(tmp_path / "model", **{"tokenizer/vocab.txt": b"a\nb\n", "empty.txt": b""})
    done = _push(content, private=True)

    local = Path(snapshot_download(REPO, local_dir=tmp_path / "back", endpoint=hub.endpoint, token=hub.token))
    for entry in content.entries():
        data = (local / entry.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry.size, entry.sha256)
    repo = hub.repos[REPO]
    assert done.created
    assert done.revision == repo.branches["main"]
    assert done.url == f"{hub.endpoint}/{REPO}/tree/{done.revision}"
    assert repo.private
    assert _summaries(hub) == ["initial commit", "first"]
    assert content.digest in repo.commits[-1].description
    assert json.loads((local / "trainflow.json").read_bytes())["content_digest"] == content.digest


def test_only_what_changed_is_sent_and_what_is_equal_makes_no_commit(hub: HubServer, tmp_path: Path) -> None:
    first = _push(_content(tmp_path / "a"))
    assert hub.uploads() == 1
    hub.requests.clear()
    again = _push(_content(tmp_path / "b"), "again")  # other run ids, same content
    assert (again.created, again.revision, len(hub.repos[REPO].commits)) == (False, first.revision, 2)
    assert not [request for request in hub.requests if request[0] in {"PUT", "POST"}]
    _push(_content(tmp_path / "c", **{"config.json": b'{"a": 1}'}), "second")
    assert hub.uploads() == 0
    assert _summaries(hub) == ["initial commit", "first", "second"]


def test_files_we_no_longer_publish_go_and_files_of_others_stay(hub: HubServer, tmp_path: Path) -> None:
    _push(_content(tmp_path / "a", **{"old-shard.safetensors": b"old"}))
    repo = hub.repos[REPO]
    repo.add("main", "by hand", "", {**repo.commits[-1].files, "picture.png": Blob(b"png", lfs=False)})
    _push(_content(tmp_path / "b"), "second")
    files = repo.commits[-1].files
    assert "picture.png" in files
    assert "old-shard.safetensors" not in files


@pytest.mark.parametrize(
    "broken", ["/lfs/", "/verify", "/preupload/", "/objects/batch", "/commit/", "/repos/create", "/tree/"]
)
def test_a_server_that_fails_in_the_middle_is_a_storage_error_and_the_same_call_continues(
    hub: HubServer, tmp_path: Path, broken: str
) -> None:
    content = _content(tmp_path / "model")
    hub.fault = lambda method, path: 503 if broken in path + "/" else None
    with pytest.raises(StorageError, match=r"publish\.to = hf://org/digits: The Hub failed"):
        _push(content)
    assert len(hub.repos[REPO].commits if REPO in hub.repos else []) <= 1  # no commit of the push, and no half of one
    sent = hub.uploads() if broken == "/commit/" else 0
    hub.fault = lambda method, path: None
    assert _push(content).created
    assert len(hub.repos[REPO].commits) == 2
    if broken == "/commit/":
        assert hub.uploads() == sent  # the large file had arrived


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub: HubServer, tmp_path: Path) -> None:
    content = _content(tmp_path / "model")
    hub.after = lambda method, path: "drop" if "/commit/" in path else None
    with pytest.raises(StorageError, match="cannot be reached"):
        _push(content)
    hub.after = lambda method, path: None
    assert not _push(content).created
    assert _summaries(hub) == ["initial commit", "first"]


def test_somebody_elses_commit_in_between_is_not_overwritten_blindly(hub: HubServer, tmp_path: Path) -> None:
    _push(_content(tmp_path / "a"))
    repo = hub.repos[REPO]

    def intrude(method: str, path: str) -> None:
        if "/commit/" in path and len(repo.commits) == 2:
            repo.add("main", "theirs", "", {**repo.commits[-1].files, "theirs.txt": Blob(b"x", lfs=False)})

    hub.fault = intrude
    second = _content(tmp_path / "b", weights=b"new")
    with pytest.raises(StorageError, match="412"):
        _push(second, "second")
    _push(second, "second")
    assert _summaries(hub) == ["initial commit", "first", "theirs", "second"]
    assert "theirs.txt" in repo.commits[-1].files


def test_a_branch_of_its_own(hub: HubServer, tmp_path: Path) -> None:
    publish(f"hf://{REPO}@next", _content(tmp_path / "a"), message="first")
    repo = hub.repos[REPO]
    assert set(repo.branches) == {"main", "next"}
    assert "model.safetensors" not in repo.at("main").files  # type: ignore[union-attr]
    _push(_content(tmp_path / "a"), "on main", revision="other")
    assert set(repo.branches) == {"main", "next", "other"}


def test_a_wrong_token_is_bad_input_and_is_not_shown(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong" + "x" * 20)
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        _push(_content(tmp_path / "a"))
    assert "hf_wrong" not in json.dumps(caught.value.to_record())


def test_a_card_the_hub_refuses_and_a_source_that_changed_are_noticed(hub: HubServer, tmp_path: Path) -> None:
    content = _content(tmp_path / "a")
    with pytest.raises(ConfigError, match="rejects the content"):
        _push(Content(content.files, {"README.md": b"---\nlicense: [\n---\n"}))
    (tmp_path / "a" / "model.safetensors").write_bytes(b"x" * 3_000_000)
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        _push(content)


def test_files_of_a_remote_store_are_published_one_at_a_time(hub: HubServer) -> None:
    data = {"model.safetensors": b"a" * 2_000_000, "b.safetensors": b"b" * 2_000_000}
    try:
        _push(
            _content("memory://hub-test/model", data["model.safetensors"], **{"b.safetensors": data["b.safetensors"]})
        )
        files = hub.repos[REPO].commits[-1].files
        assert {path: files[path].data for path in data} == data
    finally:
        Store.open("memory://hub-test/model").delete_tree()


def test_holds_tells_whether_a_publication_is_still_there(hub: HubServer, tmp_path: Path) -> None:
    content = _content(tmp_path / "a")
    done = _push(content)
    target = open_hub(f"hf://{REPO}")
    assert target.holds(done.revision, content.digest)
    assert not target.holds(done.revision, "0" * 64)
    assert not target.holds("0" * 40, content.digest)
    del hub.repos[REPO]
    assert not target.holds(done.revision, content.digest)


def test_a_dead_server_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 20)
    monkeypatch.setattr("huggingface_hub.utils._http.time", ImpatientTime())
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:9"):
        _push(_content(tmp_path / "a"))


@pytest.mark.parametrize("to", ["hf://", "hf://name", "hf://a/b/c", "hf://a/../b", "hf://a/b@", "hf://a/b@x y"])
def test_a_malformed_address_is_bad_input(to: str) -> None:
    with pytest.raises(ConfigError, match="hf://organisation/name"):
        open_hub(to)
    with pytest.raises(ConfigError, match="another revision"):
        open_hub("hf://a/b@one", revision="two")
