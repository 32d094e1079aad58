"""S3 and what speaks its protocol: concurrent multipart uploads and ranged reads through s3fs's own client.

s3fs's file object sends one part after the other. Here several parts are on their way while the next one is filled, and
a part goes from its staging buffer to the socket without being copied again. Retrying a request is the client's
business; every request of an upload carries the store's own checksum of the part.

An upload becomes visible in one step, when it is completed; it is then looked at once more before success is reported.
What a killed process left unfinished is invisible but costs money: the next writer of the name, and `delete_tree`,
remove it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import mmap
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future, wait
from typing import Any, BinaryIO, cast

from trainer_lib.storage.ranges import AheadReader, Buffer
from trainer_lib.storage.remote import RemoteBackend

PART = 16 * 2**20
"""Bytes of one part; at least 5 MiB by the protocol."""
STAGED = 7
"""Parts in memory, on their way or being filled: 112 MiB, and no more copies of them."""
_DOUBLE_EVERY = 2500
"""Parts after which the size of a part doubles: 10,000 parts, which is all an upload may have, then hold 580 GiB."""
_SLICE = 256 * 2**10
"""Bytes handed to the socket at a time."""
_TRIES = 5
"""How often an answer that breaks off is asked for."""

Call = Callable[..., "Future[dict[str, Any]]"]
"""Begin one request of the S3 client."""


class S3Backend(RemoteBackend):
    """A folder in a bucket."""

    def open_read(self, rel: str) -> BinaryIO:
        """A stream that reads ahead; a file that is replaced meanwhile is an error, never a mixture."""
        path, info = self.path(rel), self._info(rel)
        tag = info.get("ETag")
        return cast(BinaryIO, AheadReader(lambda start, end: self._fetch(path, start, end, tag), int(info["size"])))

    def open_write(self, rel: str) -> BinaryIO:
        """A stream whose parts go out concurrently."""
        bucket, key, _ = self.fs.split_path(self.path(rel))
        return cast(BinaryIO, S3Writer(self._begin, self._begin_part, bucket, key))

    def finish(self, stream: BinaryIO) -> None:
        """Complete the upload and see it there."""
        cast(S3Writer, stream).finish()

    def abort(self, stream: BinaryIO, rel: str) -> None:
        """Withdraw the upload and its parts."""
        cast(S3Writer, stream).abort()
        with contextlib.suppress(Exception):
            self.fs.rm_file(self.path(rel))

    def delete_tree(self, rel: str) -> None:
        """Remove the files, and the parts of uploads that never ended."""
        super().delete_tree(rel)
        bucket, key, _ = self.fs.split_path(self.path(rel))
        prefix = f"{key}/" if key else ""
        withdraw_uploads(self._begin, bucket, prefix, lambda name, upload: True)

    def _begin(self, method: str, **arguments: Any) -> Future[dict[str, Any]]:
        return asyncio.run_coroutine_threadsafe(self.fs._call_s3(method, **arguments), self.fs.loop)

    def _begin_part(self, **arguments: Any) -> Future[dict[str, Any]]:
        client = self._client_for_parts()
        return asyncio.run_coroutine_threadsafe(client._call_s3("upload_part", **arguments), client.loop)

    def _client_for_parts(self) -> Any:
        """Over TLS the same client. Elsewhere one that does not hash a part a second time, to sign it.

        The store checks each part's CRC32; who tampers with one on its way is found out by the SHA-256 in the commit,
        which is itself signed. A client that was told to sign payloads does.
        """
        options = dict(self.fs.config_kwargs)
        if not str(self.fs.endpoint_url or "").startswith("http:"):
            return self.fs
        options["s3"] = {"payload_signing_enabled": False, **(options.get("s3") or {})}
        return type(self.fs)(**{**self.fs.storage_options, "config_kwargs": options})

    def _fetch(self, path: str, start: int, end: int, tag: str | None = None) -> Future[Buffer]:
        return asyncio.run_coroutine_threadsafe(self._read(path, start, end, tag), self.fs.loop)

    async def _read(self, path: str, start: int, end: int, tag: str | None) -> Buffer:
        """Bytes [start, end). s3fs asks again until an answer begins; one that breaks off is asked for again here."""
        bucket, key, _ = self.fs.split_path(path)
        wanted = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
        if tag:
            wanted["IfMatch"] = tag
        attempt = 0
        while True:
            attempt += 1
            answer = await self.fs._call_s3("get_object", **wanted)
            try:
                return cast(bytes, await answer["Body"].read())
            except Exception:
                if attempt == _TRIES:
                    raise
                await asyncio.sleep(0.1 * 2**attempt)
            finally:
                answer["Body"].close()


class S3Writer:
    """One file being uploaded. Small ones are a single put; larger ones are sent in parts while they are written."""

    def __init__(self, begin: Call, begin_part: Call, bucket: str, key: str) -> None:
        self._begin_call = begin
        self._begin_part = begin_part
        self._where = {"Bucket": bucket, "Key": key}
        self._began = False
        self._upload: str | None = None
        self._tags: dict[int, str] = {}
        self._flying: dict[Future[dict[str, Any]], tuple[int, mmap.mmap]] = {}
        self._idle: list[mmap.mmap] = []
        self._part = self._fresh(PART)
        self._filled = 0
        self._size = 0
        self._number = 1

    def write(self, data: Buffer) -> int:
        """Append; blocks while too many parts are on their way. A part's failure is raised by the next call."""
        view = memoryview(data)
        rest = view
        while len(rest):
            if self._filled == len(self._part):
                self._send()
            taken = min(len(rest), len(self._part) - self._filled)
            self._part[self._filled : self._filled + taken] = rest[:taken]
            self._filled += taken
            rest = rest[taken:]
        self._size += len(view)
        return len(view)

    def finish(self) -> None:
        """Make the file visible, and see that it is."""
        if self._upload is None:
            self._call("put_object", Body=bytes(memoryview(self._part)[: self._filled]))
            return
        if self._filled:
            self._send()
        self._settle(len(self._flying))
        tags = [tag for _, tag in sorted(self._tags.items())]
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        try:
            answer = self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
            tag = answer.get("ETag")
        except FileNotFoundError:
            # "No such upload": an answer got lost, and the client's second try found the first one's work done.
            tag = _composed(tags)
            if tag is None:
                raise
        self._see(tag)
        self._began = False

    def abort(self) -> None:
        """Give up: no part stays on its way or in the store."""
        for future in self._flying:
            future.cancel()
        for future in self._flying:
            with contextlib.suppress(Exception, CancelledError):
                future.result()
        self._flying.clear()
        self._idle.clear()
        if self._upload is not None:
            with contextlib.suppress(Exception):
                self._call("abort_multipart_upload", UploadId=self._upload)
        if self._began:
            # Listed still: a part that arrived after the abort, or an upload whose beginning was not answered.
            self._upload = None
            self._withdraw_others()
        self._began = False

    def _withdraw_others(self) -> None:
        """Remove what a killed writer of this name left, and an upload that was begun twice as an answer got lost."""
        bucket, key = self._where["Bucket"], self._where["Key"]
        withdraw_uploads(self._begin_call, bucket, key, lambda name, upload: name == key and upload != self._upload)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._begin_call(method, **self._where, **arguments).result()

    def _send(self) -> None:
        """Let the filled part go, and get an empty one."""
        if self._upload is None:
            self._began = True
            self._upload = self._call("create_multipart_upload")["UploadId"]
            self._withdraw_others()
        body = _Body(memoryview(self._part)[: self._filled])
        sent = self._begin_part(**self._where, UploadId=self._upload, PartNumber=self._number, Body=body)
        self._flying[sent] = (self._number, self._part)
        self._number += 1
        self._filled = 0
        self._settle(len(self._flying) + 1 - STAGED)
        self._part = self._fresh(PART * 2 ** ((self._number - 1) // _DOUBLE_EVERY))

    def _settle(self, least: int) -> None:
        """Take in the parts that have arrived; wait for at least that many."""
        while self._flying:
            done, _ = wait(self._flying, timeout=None if least > 0 else 0, return_when="FIRST_COMPLETED")
            if not done:
                return
            for future in done:
                number, part = self._flying.pop(future)
                self._tags[number] = future.result()["ETag"]
                self._idle.append(part)
            least -= len(done)

    def _fresh(self, size: int) -> mmap.mmap:
        """An empty part, used before if possible: new memory costs as much as copying."""
        while self._idle:
            part = self._idle.pop()
            if len(part) == size:
                return part
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _see(self, tag: str | None) -> None:
        seen = self._call("head_object")
        if seen["ContentLength"] != self._size or (tag is not None and seen.get("ETag") != tag):
            raise OSError(errno.EIO, f"the store has {seen['ContentLength']} of {self._size} bytes, or another file")


class _Body:
    """A part as the client wants it: readable more than once (to sign it, to send it again), sent in slices."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = -1) -> memoryview:
        """The next bytes, not copied."""
        end = len(self._view) if size is None or size < 0 else self._at + size
        data = self._view[self._at : end]
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of any file."""
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        """As of any file."""
        return self._at

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        """Slices for the socket: a whole part at once would be copied several times on its way."""
        for start in range(0, len(self._view), _SLICE):
            yield self._view[start : start + _SLICE]


def withdraw_uploads(begin: Call, bucket: str, prefix: str, chosen: Callable[[str, str], bool]) -> None:
    """Remove unfinished uploads below a prefix, those `chosen` by key and id.

    Best effort: not every store lists them, not everybody may.
    """
    with contextlib.suppress(Exception):
        listed = begin("list_multipart_uploads", Bucket=bucket, Prefix=prefix).result()
        for upload in listed.get("Uploads") or []:
            where = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
            if chosen(*where.values()):
                with contextlib.suppress(Exception):
                    begin("abort_multipart_upload", Bucket=bucket, **where).result()


def _composed(tags: list[str]) -> str | None:
    """The ETag of an upload that has these parts; None where the store's tags are not MD5 sums.

    Source: "ETag" in https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html.
    """
    with contextlib.suppress(ValueError):
        joined = b"".join(bytes.fromhex(tag.strip('"')) for tag in tags)
        return f'"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(tags)}"'
    return None
