"""Publishing to a server that speaks the Hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from huggingface_hub import HfApi, snapshot_download

from tests.support.hub_server import Blob, HubServer, ImpatientTime
from trainer_lib.errors import ConfigError, DamagedError, StorageError
from trainer_lib.hub.base import Content, Source
from trainer_lib.hub.transport import open_hub, publish
from trainer_lib.storage import FileEntry, Store

# huggingface_hub hands file objects to its HTTP client in a way the client deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

REPO = "org/digits"
README = b"---\nlicense: apache-2.0\n---\n# Digits\n"


def _content(folder: Path, weights: bytes = b"w" * 3_000_000, **more: bytes) -> Content:
    store = Store.open(folder)
    files = {
        path: Source(store, store.write_bytes(path, data))
        for path, data in {"model.safetensors": weights, "config.json": b"{}", **more}.items()
    }
    return Content(files, {"README.md": README}, {"run": os.urandom(4).hex()})


def test_what_is_published_comes_back_byte_for_byte(hub: HubServer, tmp_path: Path) -> None:
    content = _content(tmp_path / "model", **{"tokenizer/vocab.txt": b"a\nb\n", "empty.txt": b""})
    done = publish(f"hf://{REPO}", content, message="first", private=True)

    local = Path(snapshot_download(REPO, local_dir=tmp_path / "back", endpoint=hub.endpoint, token=hub.token))
    for entry in content.entries():
        data = (local / entry.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry.size, entry.sha256)
    repo = hub.repos[REPO]
    assert done.created
    assert done.revision == repo.branches["main"]
    assert done.url == f"{hub.endpoint}/{REPO}/tree/{done.revision}"
    assert repo.private
    assert [commit.summary for commit in repo.commits] == ["initial commit", "first"]
    assert content.digest in repo.commits[-1].description
    assert json.loads((local / "trainflow.json").read_bytes())["content_digest"] == content.digest


def test_publishing_the_same_again_makes_no_commit_and_sends_no_file(hub: HubServer, tmp_path: Path) -> None:
    first = publish(f"hf://{REPO}", _content(tmp_path / "a"), message="first")
    hub.requests.clear()
    again = publish(f"hf://{REPO}", _content(tmp_path / "b"), message="again")  # other run ids, same content
    assert (again.created, again.revision) == (False, first.revision)
    assert len(hub.repos[REPO].commits) == 2
    assert not [request for request in hub.requests if request[0] in {"PUT", "POST"}]


def test_only_what_changed_is_sent(hub: HubServer, tmp_path: Path) -> None:
    publish(f"hf://{REPO}", _content(tmp_path / "a", **{"config.json": b"{}"}), message="first")
    assert hub.uploads() == 1
    publish(f"hf://{REPO}", _content(tmp_path / "b", **{"config.json": b'{"a": 1}'}), message="second")
    assert hub.uploads() == 1
    assert len(hub.repos[REPO].commits) == 3


def test_files_we_no_longer_publish_go_and_files_of_others_stay(hub: HubServer, tmp_path: Path) -> None:
    publish(f"hf://{REPO}", _content(tmp_path / "a", **{"old-shard.safetensors": b"old"}), message="first")
    repo = hub.repos[REPO]
    repo.add("main", "by hand", "", {**repo.commits[-1].files, "picture.png": Blob(b"png", lfs=False)})
    publish(f"hf://{REPO}", _content(tmp_path / "b"), message="second")
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
        publish(f"hf://{REPO}", content, message="first")
    assert len(hub.repos[REPO].commits if REPO in hub.repos else []) <= 1  # no commit of the push, and no half of one
    sent = hub.uploads() if broken == "/commit/" else 0
    hub.fault = lambda method, path: None
    assert publish(f"hf://{REPO}", content, message="first").created
    assert len(hub.repos[REPO].commits) == 2
    if broken == "/commit/":
        assert hub.uploads() == sent  # the large file had arrived


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub: HubServer, tmp_path: Path) -> None:
    content = _content(tmp_path / "model")
    hub.after = lambda method, path: "drop" if "/commit/" in path else None
    with pytest.raises(StorageError, match="cannot be reached"):
        publish(f"hf://{REPO}", content, message="first")
    hub.after = lambda method, path: None
    done = publish(f"hf://{REPO}", content, message="first")
    assert not done.created
    assert [commit.summary for commit in hub.repos[REPO].commits] == ["initial commit", "first"]


def test_somebody_elses_commit_in_between_is_not_overwritten_blindly(hub: HubServer, tmp_path: Path) -> None:
    publish(f"hf://{REPO}", _content(tmp_path / "a"), message="first")
    repo = hub.repos[REPO]

    def intrude(method: str, path: str) -> None:
        if "/commit/" in path and len(repo.commits) == 2:
            repo.add("main", "theirs", "", {**repo.commits[-1].files, "theirs.txt": Blob(b"x", lfs=False)})

    hub.fault = intrude
    with pytest.raises(StorageError, match="412"):
        publish(f"hf://{REPO}", _content(tmp_path / "b", weights=b"new"), message="second")
    publish(f"hf://{REPO}", _content(tmp_path / "b", weights=b"new"), message="second")
    assert [commit.summary for commit in repo.commits] == ["initial commit", "first", "theirs", "second"]
    assert "theirs.txt" in repo.commits[-1].files


def test_a_branch_of_its_own(hub: HubServer, tmp_path: Path) -> None:
    publish(f"hf://{REPO}@next", _content(tmp_path / "a"), message="first")
    repo = hub.repos[REPO]
    assert set(repo.branches) == {"main", "next"}
    assert "model.safetensors" not in repo.at("main").files  # type: ignore[union-attr]
    publish(f"hf://{REPO}", _content(tmp_path / "a"), message="on main", revision="other")
    assert set(repo.branches) == {"main", "next", "other"}


def test_a_wrong_token_is_bad_input_and_the_token_is_not_told(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong" + "x" * 20)
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        publish(f"hf://{REPO}", _content(tmp_path / "a"), message="first")
    assert "hf_wrong" not in json.dumps(caught.value.to_record())


def test_a_card_the_hub_refuses_is_bad_input(hub: HubServer, tmp_path: Path) -> None:
    content = Content(_content(tmp_path / "a").files, {"README.md": b"---\nlicense: [\n---\n"})
    with pytest.raises(ConfigError, match="rejects the content"):
        publish(f"hf://{REPO}", content, message="first")


def test_a_source_that_changed_is_noticed(hub: HubServer, tmp_path: Path) -> None:
    content = _content(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").write_bytes(b"x" * 3_000_000)
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        publish(f"hf://{REPO}", content, message="first")


def test_files_of_a_remote_store_are_published_one_at_a_time(hub: HubServer, tmp_path: Path) -> None:
    store = Store.open("memory://hub-test/model")
    try:
        data = {"a.safetensors": b"a" * 2_000_000, "b.safetensors": b"b" * 2_000_000, "config.json": b"{}"}
        content = Content({path: Source(store, store.write_bytes(path, value)) for path, value in data.items()})
        publish(f"hf://{REPO}", content, message="first")
        files = hub.repos[REPO].commits[-1].files
        assert {path: files[path].data for path in data} == data
    finally:
        store.delete_tree()


def test_holds_tells_whether_a_publication_is_still_there(hub: HubServer, tmp_path: Path) -> None:
    content = _content(tmp_path / "a")
    done = publish(f"hf://{REPO}", content, message="first")
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
        publish(f"hf://{REPO}", _content(tmp_path / "a"), message="first")


@pytest.mark.parametrize("to", ["hf://", "hf://name", "hf://a/b/c", "hf://a/../b", "hf://a/b@", "hf://a/b@x y"])
def test_a_malformed_address_is_bad_input(to: str) -> None:
    with pytest.raises(ConfigError, match="hf://organisation/name"):
        open_hub(to)


def test_two_revisions_are_bad_input() -> None:
    with pytest.raises(ConfigError, match="another revision"):
        open_hub("hf://a/b@one", revision="two")


def test_the_server_serves_the_vendors_own_upload_folder(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "x.bin").write_bytes(b"1" * 10)
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    api.create_repo("me/x")
    api.upload_folder(repo_id="me/x", folder_path=tmp_path / "f")
    assert hub.repos["me/x"].commits[-1].files["x.bin"].data == b"1" * 10
    assert FileEntry("x.bin", 10, hashlib.sha256(b"1" * 10).hexdigest()).sha256 in hub.objects
