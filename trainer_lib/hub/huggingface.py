"""The Hugging Face Hub, or any server that speaks its protocol.

`HF_ENDPOINT` and `HF_TOKEN` are read from the environment when used. One commit holds everything, so a revision is
there or not. Before it, the remote tree is compared with the content by digest (the Hub's LFS id is the sha256 of a
file, the id of a small one its git blob hash): if all is there, no commit is made, so a retry after a lost answer is
harmless. Files of our last publication that this one lacks are deleted; files that others put there are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainer_lib.commit import content_digest
from trainer_lib.errors import ConfigError, DamagedError, StorageError, TrainflowError, first_line
from trainer_lib.hub.base import Content, Published, Source
from trainer_lib.storage import FileEntry

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.hf_api import RepoFile

RECORD = "trainflow.json"  # what we published last: files and lineage. Written for people and for deletions only
RECORD_BYTES = 16 << 20
MAIN = "main"
_HTTP_CLIENTS = {"httpx", "httpx2", "httpcore", "requests"}  # of huggingface_hub's versions
IN_MEMORY_BYTES = 1 << 20  # files of a remote store up to this size are sent from memory, larger ones through the disk


class HuggingFaceHub:
    """Publishes to the model repository `repo` ("organisation/name").

    `token`: instead of HF_TOKEN or the logged-in one.
    """

    def __init__(
        self,
        repo: str,
        *,
        branch: str | None = None,
        private: bool | None = None,
        field: str = "publish.to",
        token: str | None = None,
    ) -> None:
        self.repo = repo
        self._token = token
        self.branch = branch or MAIN
        self.target = f"hf://{repo}" + (f"@{branch}" if branch else "")
        self._private = private
        self._field = field

    def holds(self, revision: str, digest: str) -> bool:
        """Whether the commit `revision` is there, with all the files it had; three small requests."""
        from huggingface_hub.errors import HfHubHTTPError

        with self._typed():
            api = _api(self._token)
            try:
                tree = self._tree(api, revision)
            except HfHubHTTPError as error:
                if error.response.status_code == 404:  # the repository or the commit was deleted
                    return False
                raise
            record = self._record(api, revision)
            entries = [FileEntry(str(f["path"]), int(f["size"]), str(f["sha256"])) for f in record.get("files", ())]
            there = all(entry.path in tree and _same_size(tree[entry.path], entry) for entry in entries)
            return bool(entries) and there and content_digest(entries) == digest

    def publish(self, content: Content, *, message: str) -> Published:
        """Commit what differs from the branch's head; nothing when nothing does."""
        with self._typed(), _no_progress_bars():
            api = _api(self._token)
            head = self._head(api)
            tree = self._tree(api, head)
            changed = [entry for entry in content.entries() if not _same(tree.get(entry.path), entry, content)]
            stale = self._stale(api, head, content, tree)
            if not changed and not stale:
                return self._published(api, head, content, created=False)
            with tempfile.TemporaryDirectory(prefix="trainflow-") as staging:
                operations = self._operations(api, content, changed, stale, Path(staging))
                commit = api.create_commit(
                    self.repo,
                    operations,
                    commit_message=message,
                    commit_description=f"Content digest: {content.digest}",
                    revision=self.branch,
                    parent_commit=head,
                    repo_type="model",
                )
            made = str(commit.oid)
            self._confirm(api, made, content)
            return self._published(api, made, content, created=True)

    def create(self) -> str:
        """Make the repository unless it is there; its full name (a name without an owner is the token owner's)."""
        with self._typed():
            made = _api(self._token).create_repo(self.repo, private=self._private, repo_type="model", exist_ok=True)
            return str(made.repo_id)

    def _head(self, api: HfApi) -> str:
        """The commit at the head of the branch; makes repository and branch when they are missing."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            return str(api.repo_info(self.repo, revision=self.branch, repo_type="model").sha)
        except RevisionNotFoundError:
            api.create_branch(self.repo, branch=self.branch, repo_type="model", exist_ok=True)
        except RepositoryNotFoundError:
            api.create_repo(self.repo, private=self._private, repo_type="model", exist_ok=True)
            if self.branch != MAIN:
                api.create_branch(self.repo, branch=self.branch, repo_type="model", exist_ok=True)
        return str(api.repo_info(self.repo, revision=self.branch, repo_type="model").sha)

    def _tree(self, api: HfApi, revision: str) -> dict[str, RepoFile]:
        from huggingface_hub.hf_api import RepoFile

        items = api.list_repo_tree(self.repo, recursive=True, revision=revision, repo_type="model")
        return {item.path: item for item in items if isinstance(item, RepoFile)}

    def _record(self, api: HfApi, revision: str) -> dict[str, Any]:
        """Our record at a commit; empty when there is none, or none of ours."""
        from huggingface_hub.errors import EntryNotFoundError

        with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
            try:
                path = api.hf_hub_download(self.repo, RECORD, revision=revision, local_dir=folder, repo_type="model")
            except EntryNotFoundError:
                return {}
            if Path(path).stat().st_size > RECORD_BYTES:
                return {}
            with contextlib.suppress(ValueError):
                record = json.loads(Path(path).read_bytes())
                return record if isinstance(record, dict) else {}
        return {}

    def _stale(self, api: HfApi, head: str, content: Content, tree: dict[str, RepoFile]) -> list[str]:
        if RECORD not in tree:
            return []
        ours = {file["path"] for file in self._record(api, head).get("files", ()) if isinstance(file, dict)}
        keep = {entry.path for entry in content.entries()} | {RECORD}
        return sorted(path for path in ours - keep if path in tree and not path.startswith(content.kept))

    def _operations(
        self, api: HfApi, content: Content, changed: list[FileEntry], stale: list[str], staging: Path
    ) -> list[CommitOperationAdd | CommitOperationDelete]:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations: list[CommitOperationAdd | CommitOperationDelete] = [CommitOperationDelete(path) for path in stale]
        for entry in changed:
            if entry.path in content.texts:
                operations.append(CommitOperationAdd(entry.path, content.texts[entry.path]))
                continue
            source = content.files[entry.path]
            if source.store.is_local:
                path = source.store.local_path(source.entry.path)
                operations.append(CommitOperationAdd(entry.path, str(path)))
            else:
                operations.append(self._fetched(api, entry.path, source, staging))
        operations.append(CommitOperationAdd(RECORD, _record_of(content)))
        return operations

    def _fetched(self, api: HfApi, path: str, source: Source, staging: Path) -> CommitOperationAdd:
        """A file of a remote store; large ones are uploaded at once, so the disk need hold only one of them."""
        from huggingface_hub import CommitOperationAdd

        local = staging / hashlib.sha256(path.encode()).hexdigest()
        source.store.download(source.entry.path, local, expect=source.entry)
        if source.entry.size <= IN_MEMORY_BYTES:
            return CommitOperationAdd(path, local.read_bytes())
        operation = CommitOperationAdd(path, str(local))
        api.preupload_lfs_files(self.repo, additions=[operation], revision=self.branch, repo_type="model")
        if operation.path_or_fileobj == b"":  # uploaded; one that the Hub takes as a regular file stays for the commit
            local.unlink()
        return operation

    def _confirm(self, api: HfApi, commit: str, content: Content) -> None:
        """What the Hub has now is what was committed to be published: a source may have changed while it was read."""
        tree = self._tree(api, commit)
        wrong = [entry.path for entry in content.entries() if not _same(tree.get(entry.path), entry, content)]
        if wrong:
            raise DamagedError(
                f"The Hub holds other bytes than its stage committed: {', '.join(wrong[:3])}.",
                field=self.target,
                remedy="Run the stage it comes from again, then publish again.",
            )

    def _published(self, api: HfApi, commit: str, content: Content, *, created: bool) -> Published:
        url = f"{api.endpoint.rstrip('/')}/{self.repo}/tree/{commit}"
        return Published(self.target, url, commit, content.digest, created, tuple(content.entries()))

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        """Failures of the Hub as ours: refused is bad input, out of reach is worth a retry."""
        try:
            with warnings.catch_warnings():
                # Predictions may be part of what is published; the advice to use a data set repository is noise.
                warnings.filterwarnings("ignore", message="It seems that you are about to commit a data file")
                yield
        except TrainflowError:
            raise
        except Exception as error:
            typed = self._typed_error(error)
            if typed is None:
                raise
            raise typed from error

    def _typed_error(self, error: Exception) -> TrainflowError | None:
        from huggingface_hub.errors import HfHubHTTPError

        if type(error) is RuntimeError and isinstance(error.__cause__, Exception):
            error = error.__cause__  # a failed upload is wrapped
        where: dict[str, Any] = {"field": self._field, "value": self.target}
        reason = first_line(error)
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            if status in {401, 403, 404}:
                remedy = "Set HF_TOKEN to a token that may write there, and check the name."
                return ConfigError(f"The Hub refuses to be written to ({status}): {reason}", remedy=remedy, **where)
            if status in {400, 422}:
                return ConfigError(f"The Hub does not accept it: {reason}", remedy="See the reason given.", **where)
            return StorageError(f"The Hub failed ({status}): {reason}", remedy="Run the same command again.", **where)
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _HTTP_CLIENTS:
            endpoint = os.environ.get("HF_ENDPOINT") or "the Hub"
            remedy = f"Check the connection to {endpoint}, then run the same command again."
            return StorageError(f"The Hub is out of reach: {reason}", remedy=remedy, **where)
        if isinstance(error, ValueError):
            return ConfigError(f"The Hub does not accept it: {reason}", remedy="See the reason given.", **where)
        return None


def licence_of(repo: str, *, token: str | None = None) -> str | None:
    """The licence that a model's repository names; None when there is none, no such repository, or no Hub."""
    try:
        tags = _api(token).model_info(repo, timeout=10).tags or []
    except Exception:  # a draft of a card is no reason to fail, whatever the Hub says
        return None
    return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)


def _api(token: str | None = None) -> HfApi:
    """A client of the endpoint the environment names now, whatever it named when huggingface_hub was imported."""
    from huggingface_hub import HfApi, constants

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    host = urlsplit(endpoint).hostname or ""
    if "HF_HUB_DISABLE_XET" not in os.environ and host != "huggingface.co" and not host.endswith(".huggingface.co"):
        # A plain server has no Xet storage. The constant is read at every upload.
        constants.HF_HUB_DISABLE_XET = True
    return HfApi(
        endpoint=endpoint.rstrip("/"), token=token or os.environ.get("HF_TOKEN") or None, library_name="trainflow"
    )


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


def _same(remote: RepoFile | None, entry: FileEntry, content: Content) -> bool:
    if remote is None or not _same_size(remote, entry):
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == entry.sha256)
    return bool(remote.blob_id == _blob_id(content, entry))


def _same_size(remote: RepoFile, entry: FileEntry) -> bool:
    return bool((remote.lfs.size if remote.lfs is not None else remote.size) == entry.size)


def _blob_id(content: Content, entry: FileEntry) -> str:
    """What git calls the file: sha1 over "blob <size>", a zero byte and the content."""
    digest = hashlib.sha1(f"blob {entry.size}\0".encode(), usedforsecurity=False)
    with content.open(entry.path) as stream:
        while chunk := stream.read(8 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _record_of(content: Content) -> bytes:
    files = [{"path": entry.path, "size": entry.size, "sha256": entry.sha256} for entry in content.entries()]
    record = {
        "format": 1,
        "kind": "published",
        "content_digest": content.digest,
        "files": files,
        "lineage": content.lineage,
    }
    return json.dumps(record, indent=2, sort_keys=True).encode() + b"\n"
