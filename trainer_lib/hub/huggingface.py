"""The Hugging Face Hub, or any server that speaks its protocol.

`HF_ENDPOINT` and `HF_TOKEN` are read from the environment at every use. One commit holds a whole publication, so a
revision is complete or absent. The content is first compared with the remote files by digest (the SHA-256 of an LFS
file, the git blob hash of a small one). When nothing differs, nothing is committed, so a retry after a lost answer is
harmless. Files of our previous publication that the new one lacks are deleted; files of other origin stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainer_lib.base.json_text import parse_record
from trainer_lib.errors import ConfigError, DamagedError, StoreUnreachableError, TrainflowError, first_line
from trainer_lib.hub.base import Content, Published, Source
from trainer_lib.storage import FileEntry
from trainer_lib.storage.commit import content_digest
from trainer_lib.storage.outages import describe_outage, is_strange

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.hf_api import RepoFile

RECORD = "trainflow.json"  # files and lineage of our newest publication, for people and for deleting stale files
MAX_RECORD_BYTES = 16 << 20
CARD = "README.md"
MAIN = "main"
_HTTP_CLIENTS = {"httpx", "httpx2", "httpcore", "requests"}  # used by the versions of huggingface_hub
MAX_MEMORY_BYTES = 1 << 20  # a larger file of a remote store is staged on the local disk


class HuggingFaceHub:
    """Publishes to a model repository ("organisation/name"), by default to its branch main.

    `private` is for a repository that has to be created, by default the organisation's setting. `token` takes the place
    of HF_TOKEN and of the stored login. Errors name `field`, and call the transfer an `action`.
    """

    def __init__(
        self,
        repo: str,
        *,
        branch: str | None = None,
        private: bool | None = None,
        field: str = "publish.to",
        token: str | None = None,
        action: str = "upload",
    ) -> None:
        self.repo = repo
        self._action = action
        self._token = token
        self.branch = branch or MAIN
        self.target = f"hf://{repo}" + (f"@{branch}" if branch else "")
        self._private = private
        self._field = field

    def holds(self, revision: str, digest: str) -> bool:
        """Whether the commit `revision` exists with all of its files. Takes three small requests."""
        from huggingface_hub.errors import HfHubHTTPError

        with self.errors_translated():
            api = _open_api(self._token)
            try:
                tree = self._list_files(api, revision)
            except HfHubHTTPError as error:
                if error.response.status_code == 404:  # the repository or the commit was deleted
                    return False
                raise
            entries = self._read_record(api, revision)
            is_complete = all(entry.path in tree and _has_same_size(tree[entry.path], entry) for entry in entries)
            return bool(entries) and is_complete and content_digest(entries) == digest

    def find_newest(self) -> Published | None:
        """Our publication at the head of the branch; None without repository, branch or publication."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        with self.errors_translated():
            api = _open_api(self._token)
            try:
                head = str(api.repo_info(self.repo, revision=self.branch, repo_type="model").sha)
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return None
            entries = self._read_record(api, head)
            return self._describe_result(api, head, entries, created=False) if entries else None

    def read_card(self) -> str | None:
        """The card at the head of the branch; None without repository, branch or card."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        with self.errors_translated():
            try:
                card = self._download(_open_api(self._token), CARD, self.branch)
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return None
        return None if card is None else card.decode(errors="replace")

    def publish(self, content: Content, *, message: str) -> Published:
        """Commit the files that differ from the head of the branch, if any."""
        with self.errors_translated(), _progress_bars_disabled():
            api = _open_api(self._token)
            head = self._find_head(api)
            tree = self._list_files(api, head)
            changed = _list_changed(tree, content)
            # Only files of our own record: others may keep theirs in the repository.
            ours = {entry.path for entry in self._read_record(api, head)} if RECORD in tree else set()
            keep = {entry.path for entry in content.entries()} | {RECORD}
            stale = sorted(path for path in ours - keep if path in tree and not path.startswith(content.kept))
            if not changed and not stale:
                return self._describe_result(api, head, content.entries(), created=False)
            with tempfile.TemporaryDirectory(prefix="trainflow-") as staging:
                operations = self._plan_operations(api, content, changed, stale, Path(staging))
                commit = api.create_commit(
                    self.repo,
                    operations,
                    commit_message=message,
                    commit_description=f"Content digest: {content.digest}",
                    revision=self.branch,
                    parent_commit=head,  # the Hub refuses the commit when another one came in between
                    repo_type="model",
                )
            made = str(commit.oid)
            # A source may have changed while it was uploaded.
            wrong = [entry.path for entry in _list_changed(self._list_files(api, made), content)]
            if wrong:
                what = f"The Hub holds other bytes than the stage committed: {', '.join(wrong[:3])}."
                remedy = "Run the stage that they come from again, then publish again."
                raise DamagedError(what, field=self.target, remedy=remedy)
            return self._describe_result(api, made, content.entries(), created=True)

    def create(self) -> str:
        """Create the repository unless it exists; return its full name. Without an owner, the token's owner is used."""
        with self.errors_translated():
            api = _open_api(self._token)
            made = api.create_repo(self.repo, private=self._private, repo_type="model", exist_ok=True)
            return str(made.repo_id)

    def _find_head(self, api: HfApi) -> str:
        """The commit at the head of the branch. Creates a missing repository or branch."""
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

    def _list_files(self, api: HfApi, revision: str) -> dict[str, RepoFile]:
        from huggingface_hub.hf_api import RepoFile

        items = api.list_repo_tree(self.repo, recursive=True, revision=revision, repo_type="model")
        return {item.path: item for item in items if isinstance(item, RepoFile)}

    def _read_record(self, api: HfApi, revision: str) -> list[FileEntry]:
        """The files that the record of a commit names; none without a valid one."""
        files = parse_record(self._download(api, RECORD, revision)).get("files")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return [FileEntry(str(file["path"]), int(file["size"]), str(file["sha256"])) for file in files or ()]
        return []

    def _download(self, api: HfApi, name: str, revision: str) -> bytes | None:
        """The content of a small file; None where there is none, or a large one: a repository may be anyone's."""
        from huggingface_hub.errors import RemoteEntryNotFoundError

        with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
            try:
                path = api.hf_hub_download(self.repo, name, revision=revision, local_dir=folder, repo_type="model")
            except RemoteEntryNotFoundError:
                return None
            return Path(path).read_bytes() if Path(path).stat().st_size <= MAX_RECORD_BYTES else None

    def _plan_operations(
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
                operations.append(self._stage_remote_file(api, entry.path, source, staging))
        # In the same commit, so that record and files never disagree.
        files = [{"path": entry.path, "size": entry.size, "sha256": entry.sha256} for entry in content.entries()]
        record = {"format": 1, "kind": "published", "content_digest": content.digest, "files": files}
        text = json.dumps(record | {"lineage": content.lineage}, indent=2, sort_keys=True) + "\n"
        return [*operations, CommitOperationAdd(RECORD, text.encode())]

    def _stage_remote_file(self, api: HfApi, path: str, source: Source, staging: Path) -> CommitOperationAdd:
        """Add a file of a remote store. A large one is uploaded at once, so that the disk holds only one at a time."""
        from huggingface_hub import CommitOperationAdd

        # A flat name: a repository path may have folders.
        local = staging / hashlib.sha256(path.encode()).hexdigest()
        source.store.download(source.entry.path, local, expect=source.entry)
        if source.entry.size <= MAX_MEMORY_BYTES:
            return CommitOperationAdd(path, local.read_bytes())
        operation = CommitOperationAdd(path, str(local))
        api.preupload_lfs_files(self.repo, additions=[operation], revision=self.branch, repo_type="model")
        if operation.path_or_fileobj == b"":  # uploaded; otherwise the commit itself takes the file
            local.unlink()
        return operation

    def _describe_result(self, api: HfApi, commit: str, files: list[FileEntry], *, created: bool) -> Published:
        url = f"{api.endpoint.rstrip('/')}/{self.repo}/tree/{commit}"
        return Published(self.target, url, commit, content_digest(files), created, tuple(files))

    @contextlib.contextmanager
    def errors_translated(self) -> Iterator[None]:
        """Raise the Hub's errors as ours: ConfigError for a refusal, StoreUnreachableError without an answer."""
        try:
            with warnings.catch_warnings():
                # Predictions may be published with the model: the advice to use a dataset repository does not apply.
                warnings.filterwarnings("ignore", message="It seems that you are about to commit a data file")
                yield
        except TrainflowError:
            raise
        except Exception as error:
            if (typed := self._translate_error(error)) is None:
                raise
            raise typed from error

    def _translate_error(self, error: Exception) -> TrainflowError | None:
        from huggingface_hub.errors import HfHubHTTPError

        inner = error.__cause__
        if isinstance(inner, HfHubHTTPError) or (type(error) is RuntimeError and isinstance(inner, Exception)):
            error = inner  # huggingface_hub wraps the error of a failed transfer
        where: dict[str, Any] = {"field": self._field, "value": self.target}
        reason = first_line(error).rstrip(".")
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            # The server's own words, without the client's sentence and URL around them.
            reason = (error.server_message or error.response.reason_phrase or reason).strip()
            # The Hub answers 404 also for a private repository that the token may not see.
            if status in {401, 403, 404}:
                may = "write there" if self._action == "upload" else "read it"
                remedy = f"Set HF_TOKEN to a token that may {may}, and check the name."
                return ConfigError(f"The Hub refuses the {self._action} ({status}): {reason}", remedy=remedy, **where)
            if status in {400, 422}:
                return _rejected(reason, where)
            remedy = "The same command continues once the Hub serves again."
            return StoreUnreachableError(f"The Hub failed ({status}): {reason}", remedy=remedy, **where)
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _HTTP_CLIENTS or is_strange(error):
            endpoint = os.environ.get("HF_ENDPOINT") or "the Hub"
            remedy = f"Check the connection to {endpoint}, then run the same command again."
            what = describe_outage(error) or reason
            return StoreUnreachableError(f"The Hub cannot be reached: {what}.", remedy=remedy, **where)
        # huggingface_hub checks names and operations before it sends them.
        return _rejected(reason, where) if isinstance(error, ValueError) else None


def _rejected(reason: str, where: Mapping[str, Any]) -> ConfigError:
    return ConfigError(f"The Hub rejects the content: {reason}", remedy="Change what the reason names.", **where)


def find_licence(repo: str, *, token: str | None = None) -> str | None:
    """The licence that a model's repository names; None without one, or when the Hub does not answer."""
    try:
        tags = _open_api(token).model_info(repo, timeout=10).tags or []
    except Exception:  # the licence is optional on a card: no error of the Hub may end training
        return None
    return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)


def download_snapshot(repo: str, *, revision: str | None = None) -> str:
    """The folder of the local cache with all files of a model's repository, downloaded where they are missing."""
    from huggingface_hub import snapshot_download

    hub = HuggingFaceHub(repo, branch=revision, field="model", action="download")
    with hub.errors_translated(), _progress_bars_disabled():
        api = _open_api()
        return str(
            snapshot_download(repo, revision=revision, endpoint=api.endpoint, token=api.token, library_name="trainflow")
        )


def _open_api(token: str | None = None) -> HfApi:
    """A client for the present HF_ENDPOINT, whatever it was when huggingface_hub was imported."""
    from huggingface_hub import HfApi, constants

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    host = urlsplit(endpoint).hostname or ""
    if "HF_HUB_DISABLE_XET" not in os.environ and host != "huggingface.co" and not host.endswith(".huggingface.co"):
        # Other servers have no Xet storage. huggingface_hub reads the constant at every upload.
        constants.HF_HUB_DISABLE_XET = True
    used = token or os.environ.get("HF_TOKEN") or None
    return HfApi(endpoint=endpoint.rstrip("/"), token=used, library_name="trainflow")


@contextlib.contextmanager
def _progress_bars_disabled() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    # They would break the display of a stage, or of the training alongside it.
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


def _list_changed(tree: Mapping[str, RepoFile], content: Content) -> list[FileEntry]:
    """The files whose bytes differ from those on the Hub."""
    return [entry for entry in content.entries() if not _has_same_bytes(tree.get(entry.path), entry, content)]


def _has_same_bytes(remote: RepoFile | None, entry: FileEntry, content: Content) -> bool:
    if remote is None or not _has_same_size(remote, entry):
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == entry.sha256)
    # A file that is not in LFS is listed with git's hash of its blob only: "blob <size>", a zero byte, and the content.
    digest = hashlib.sha1(f"blob {entry.size}\0".encode(), usedforsecurity=False)
    with content.open(entry.path) as stream:
        while chunk := stream.read(8 << 20):
            digest.update(chunk)
    return bool(remote.blob_id == digest.hexdigest())


def _has_same_size(remote: RepoFile, entry: FileEntry) -> bool:
    return bool((remote.lfs.size if remote.lfs is not None else remote.size) == entry.size)


def check_access(repo: str, *, field: str, writes: bool, timeout_s: float) -> None:
    """Check that the Hub answers within `timeout_s` seconds and that this user may use a model's repository.

    A repository that does not exist yet may be written to: publishing creates it.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    hub = HuggingFaceHub(repo, field=field, action="upload" if writes else "download")
    with hub.errors_translated():
        api = _open_api()
        try:
            api.repo_info(repo, repo_type="model", timeout=timeout_s)
        except RepositoryNotFoundError:
            if not writes:
                raise
    # The Hub has refused a wrong token by now, whatever the repository.
    if writes and api.token is None and get_token() is None:
        what = "There is no login for the Hub, so nothing can be written there."
        raise ConfigError(what, field=field, value=hub.target, remedy="Set HF_TOKEN to a token that may write there.")
