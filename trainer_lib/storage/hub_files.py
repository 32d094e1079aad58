"""Read the files of a repository on the Hugging Face Hub: ``hf://datasets/organisation/name[@revision]/path``.

`HF_ENDPOINT` and `HF_TOKEN`, or the login of `hf auth login`, are read at every request. A file's tag is its git blob,
which names the content, so a commit that leaves a file alone changes no tag. Nothing is written here: a model is
published by `trainer_lib.hub`, as one commit.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from typing_extensions import override

from trainer_lib.errors import ConfigError, TrainflowError, first_line
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
        with self.refusals_named():
            self.fs.resolve_path(self.root)
            return cast(BinaryIO, _HubReader(self, super().open_read(rel)))

    @override
    def _refresh(self) -> None:
        super()._refresh()
        # The methods that list call an absent repository an empty folder.
        with self.refusals_named():
            self.fs.resolve_path(self.root)

    @contextlib.contextmanager
    def refusals_named(self) -> Iterator[None]:
        """Raise ConfigError for a repository or revision that is absent or may not be read, and for a wrong name."""
        try:
            yield
        except TrainflowError:
            raise
        except (OSError, ValueError, NotImplementedError) as error:
            refusal = self._describe_refusal(error)
            if refusal is None:
                raise
            what, remedy = refusal
            raise ConfigError(what, field=self._field, value=f"{self.scheme}://{self.root}", remedy=remedy) from error

    def _describe_refusal(self, error: Exception) -> tuple[str, str] | None:
        """The failure and its remedy; None for an absent file and for a failure of the network."""
        if not isinstance(error, OSError):
            return f"This is not an address on the Hub: {first_line(error)}", "Correct the name."
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


class _HubReader(io.RawIOBase):
    """A file of a repository: the first bytes tell whether it may be read, where the repository is gated."""

    def __init__(self, backend: HubBackend, stream: BinaryIO) -> None:
        self._backend, self._stream = backend, stream

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._backend.refusals_named():
            return int(self._stream.readinto(buffer))  # type: ignore[attr-defined]  # fsspec's files have it

    @override
    def readall(self) -> bytes:
        with self._backend.refusals_named():
            return self._stream.read()

    @override
    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._stream.seek(offset, whence)

    @override
    def tell(self) -> int:
        return self._stream.tell()

    @override
    def close(self) -> None:
        self._stream.close()
        super().close()


def _read_only(path: str) -> OSError:
    return OSError(errno.EROFS, "a repository on the Hub is only read here", path)
