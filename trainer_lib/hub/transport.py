"""Opens the hub at an address. Imports neither torch nor a vendor: huggingface_hub is imported at its first use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_lib.errors import ConfigError
from trainer_lib.hub.folder import FolderHub

if TYPE_CHECKING:
    from trainer_lib.hub.huggingface import HuggingFaceHub

    Hub = FolderHub | HuggingFaceHub

SCHEME = "hf://"
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,119}")


@dataclass(frozen=True)
class Target:
    """A parsed address: a repository on the Hub, or a folder (`repo` is None)."""

    url: str
    repo: str | None
    revision: str | None


def parse_target(to: str, *, revision: str | None = None, field: str = "publish.to") -> Target:
    """Parse `hf://organisation/name[@revision]`, or the path or URL of a folder.

    Raises:
        ConfigError: the address is malformed, or names another revision than `revision`.
    """
    if revision is not None and not _REVISION.fullmatch(revision):
        what = "The name cannot be used for a branch."
        raise ConfigError(what, field="publish.revision", value=revision, remedy="Use a name like main.")
    if not to.startswith(SCHEME):
        if to.lower().startswith("hf:"):  # a local path of this name is "./hf:name"
            remedy = "Write hf://organisation/name, with two slashes and in lower case."
            what = "This is neither an address on the Hub nor a folder."
            raise ConfigError(what, field=field, value=to, remedy=remedy)
        return Target(to, None, revision)
    repo, _, named = to.removeprefix(SCHEME).partition("@")
    # `partition` cannot tell an empty branch ("name@") from none.
    if not _is_repository(repo) or (named and not _REVISION.fullmatch(named)) or to.endswith("@"):
        remedy = "Write hf://organisation/name, or …@branch."
        raise ConfigError("The address is not one on the Hub.", field=field, value=to, remedy=remedy)
    if named and revision and named != revision:
        what = f"The address names another revision than publish.revision = {revision}."
        raise ConfigError(what, field=field, value=to, remedy="Name the revision once.")
    return Target(to, repo, named or revision)


def _is_repository(repo: str) -> bool:
    """Whether the text is `organisation/name` by the rules of `huggingface_hub.utils.validate_repo_id`."""
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        return False
    return not repo.endswith(".git") and not any(part.endswith(("-", ".")) for part in repo.split("/"))


def open_hub(to: str, *, revision: str | None = None, private: bool | None = None) -> Hub:
    """Open the hub at an address, without contacting it. `private` applies to a repository that has to be created."""
    target = parse_target(to, revision=revision)
    if target.repo is None:
        return FolderHub(target.url, branch=target.revision)
    from trainer_lib.hub.huggingface import HuggingFaceHub

    return HuggingFaceHub(target.repo, branch=target.revision, private=private)
