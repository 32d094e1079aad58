"""Read the files of a repository on the Hugging Face Hub: ``hf://datasets/organisation/name[@revision]/path``.

`HF_ENDPOINT` and `HF_TOKEN`, or the login of `hf auth login`, are read at every request. A file's tag is its git blob,
which names the content, so a commit that leaves a file alone changes no tag. Nothing is written here: a model is
published by `trainer_lib.hub`, as one commit.
"""

from __future__ import annotations

import errno
from typing import Any, BinaryIO

from typing_extensions import override

from trainer_lib.errors import ConfigError, first_line
from trainer_lib.storage.outages import vendor_code, vendor_message
from trainer_lib.storage.remote import RemoteBackend
from trainer_lib.storage.urls import split_root


class HubBackend(RemoteBackend):
    """A folder of a repository, which is only read."""

    exclusive = False

    def __init__(self, scheme: str, root: str, *, field: str, fs: Any = None) -> None:
        split_root(scheme, root, field=field)  # refuses what is above a repository
        super().__init__(scheme, root, field=field, fs=fs)
        self._field = field

    @override
    def open_read(self, rel: str) -> BinaryIO:
        self._resolve()
        return super().open_read(rel)

    @override
    def _refresh(self) -> None:
        super()._refresh()
        # The methods that list call an absent repository an empty folder.
        self._resolve()

    def _resolve(self) -> None:
        """Raise ConfigError for a repository or revision that is absent or may not be read, and for a wrong name."""
        try:
            self.fs.resolve_path(self.root)
        except (OSError, ValueError, NotImplementedError) as error:
            if (refusal := self.refusal(error)) is None:
                raise
            raise refusal from error

    @override
    def refusal(self, error: Exception) -> ConfigError | None:
        described = self._describe_refusal(error)
        if described is None:
            return None
        return ConfigError(described[0], field=self._field, value=f"{self.scheme}://{self.root}", remedy=described[1])

    def _describe_refusal(self, error: Exception) -> tuple[str, str] | None:
        """The failure and its remedy; None for an absent file and for a failure of the network."""
        if isinstance(error, ValueError | NotImplementedError):
            return f"This is not an address on the Hub: {first_line(error)}", "Correct the name."
        if not isinstance(error, OSError):
            return None
        # By the classes' names, because importing them belongs to `trainer_lib.hub`.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
        names = {cls.__name__ for cls in type(cause).__mro__}
        if "OfflineModeIsEnabled" in names:
            remedy = "Unset HF_HUB_OFFLINE, or download the data to a folder and name that."
            return "HF_HUB_OFFLINE keeps it from being read.", remedy
        code = vendor_code(cause) if cause is not None else None
        if "RevisionNotFoundError" in names:
            return "The repository has no such revision.", "Name a branch, a tag or a commit of it."
        if "RepositoryNotFoundError" in names or code in ("401", "403"):
            remedy = "Check the name; where it is private or gated, set HF_TOKEN to a token that may read it."
            said = (vendor_message(cause) or "").strip().rstrip(".") if cause is not None else ""
            what = "There is no such repository, or it may not be read"
            return f"{what}: the Hub answers {code}{f' ({said})' if said else ''}.", remedy
        if "HFValidationError" in names:
            return f"This is not an address on the Hub: {first_line(cause)}", "Correct the name."  # type: ignore[arg-type]
        return None

    @override
    def _make_parents(self, path: str) -> None:
        raise _read_only(path)

    @override
    def delete(self, rel: str) -> None:
        raise _read_only(self.path(rel))

    @override
    def delete_tree(self, rel: str) -> None:
        raise _read_only(self.path(rel))


def _read_only(path: str) -> OSError:
    return OSError(errno.EROFS, "a repository on the Hub is only read here", path)
