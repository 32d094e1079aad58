"""S3 and stores with its protocol: concurrent multipart uploads and ranged reads through the client of s3fs.

s3fs's file object sends one part after the other. Here several parts are in flight while the next one is filled, and a
part goes from its staging buffer to the socket without another copy. The client retries requests; every request of an
upload carries the checksum of its part, which the store verifies.

An upload becomes visible in one step, when it is completed; the file is then looked up before success is reported. The
unfinished upload of a killed process is invisible but costs money: the next writer of the name, and `delete_tree`,
remove it. (obstore was tried in place of this file and cannot do that: docs/log.md.)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future, wait
from typing import Any, BinaryIO, cast

from typing_extensions import override

from trainer_lib.storage.remote import AheadReader, Buffer, RemoteBackend
from trainer_lib.storage.urls import FileInfo

PART = 16 * 2**20  # bytes of one part; the protocol demands at least 5 MiB
STAGED = 7  # parts in memory, in flight or being filled: 112 MiB, and there is no other copy of them
_DOUBLE_EVERY = 2500
"""Parts after which the size of a part doubles. The 10,000 parts that an upload may have then hold 580 GiB."""
_SLICE = 256 * 2**10  # bytes given to the socket at a time
_TRIES = 5  # the number of times to send a request whose answer breaks off

Call = Callable[..., "Future[dict[str, Any]]"]  # start one request of the S3 client


_KNOWN: set[str] = set()  # endpoints at which an S3 store has answered


class S3Backend(RemoteBackend):
    """A folder in a bucket."""

    @override
    def files(self, rel: str) -> list[FileInfo]:
        return super().files(rel) or self._confirm_empty()

    @override
    def names(self, rel: str) -> list[str]:
        return super().names(rel) or self._confirm_empty()

    def _confirm_empty(self) -> list[Any]:
        """Return the empty list, if a store answers at all: s3fs takes a web page for an empty folder."""
        endpoint = self.fs.endpoint_url
        if endpoint and endpoint not in _KNOWN:
            bucket, key, _ = self.fs.split_path(self.root)
            with contextlib.suppress(FileNotFoundError):
                if "Name" not in self._begin("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1).result():
                    raise OSError(errno.EPROTO, endpoint)
            _KNOWN.add(endpoint)
        return []

    @override
    def open_read(self, rel: str) -> BinaryIO:
        # The tag makes a file that is replaced while it is read an error, never a mixture of the two.
        path, info = self.path(rel), self._info(rel)
        tag = info.get("ETag")
        return cast(BinaryIO, AheadReader(lambda start, end: self._fetch(path, start, end, tag), int(info["size"])))

    @override
    def open_write(self, rel: str) -> BinaryIO:
        bucket, key, _ = self.fs.split_path(self.path(rel))
        return cast(BinaryIO, S3Writer(self._begin, self._begin_part, bucket, key))

    @override
    def delete_tree(self, rel: str) -> None:
        super().delete_tree(rel)
        bucket, key, _ = self.fs.split_path(self.path(rel))
        prefix = f"{key}/" if key else ""
        withdraw_uploads(self._begin, bucket, prefix, lambda name, upload: True)

    def _begin(self, method: str, **arguments: Any) -> Future[dict[str, Any]]:
        return asyncio.run_coroutine_threadsafe(self.fs._call_s3(method, **arguments), self.fs.loop)

    def _begin_part(self, **arguments: Any) -> Future[dict[str, Any]]:
        """Start to send a part: over plain HTTP by a client that does not sign it, over TLS by the usual one.

        Signing means hashing parts a second time. The store verifies the parts' CRC32, and the SHA-256 in the
        commit file, which is itself signed, reveals tampering. A client configured to sign payloads does sign.
        """
        client, options = self.fs, dict(self.fs.config_kwargs)
        if str(client.endpoint_url or "").startswith("http:"):
            options["s3"] = {"payload_signing_enabled": False, **(options.get("s3") or {})}
            client = type(client)(**{**client.storage_options, "config_kwargs": options})
        return asyncio.run_coroutine_threadsafe(client._call_s3("upload_part", **arguments), client.loop)

    def _fetch(self, path: str, start: int, end: int, tag: str | None = None) -> Future[Buffer]:
        return asyncio.run_coroutine_threadsafe(self._read(path, start, end, tag), self.fs.loop)

    async def _read(self, path: str, start: int, end: int, tag: str | None) -> Buffer:
        """Read bytes [start, end). s3fs retries until an answer begins; an answer that breaks off is retried here."""
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
    """One file that is being uploaded: a small one by a single put, a larger one in parts while it is written."""

    def __init__(self, begin: Call, begin_part: Call, bucket: str, key: str) -> None:
        self._begin_call = begin
        self._begin_part = begin_part
        self._where = {"Bucket": bucket, "Key": key}
        self._started = False
        self._upload: str | None = None
        self._tags: dict[int, str] = {}
        self._flying: dict[Future[dict[str, Any]], tuple[int, mmap.mmap]] = {}
        self._idle: list[mmap.mmap] = []
        self._part = self._fresh(PART)
        self._filled = 0
        self._size = 0
        self._number = 1

    def write(self, data: Buffer) -> int:
        """Append `data`; block while too many parts are in flight. The next call raises the failure of a part."""
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

    def close(self) -> None:
        """Make the file visible and check that the store has all of it."""
        if self._upload is None:
            # No part was sent, so the file is small: one request instead of three.
            self._call("put_object", Body=bytes(memoryview(self._part)[: self._filled]))
            return
        if self._filled:
            self._send()
        self._collect_parts(len(self._flying))
        # Parts arrive in any order.
        tags = [tag for _, tag in sorted(self._tags.items())]
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        tag = None
        # "No such upload": the first answer got lost, and the client's retry found the upload completed.
        with contextlib.suppress(FileNotFoundError):
            answer = self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
            tag = answer.get("ETag")
        seen = self._call("head_object")
        if seen["ContentLength"] != self._size or (tag is not None and seen.get("ETag") != tag):
            raise OSError(errno.EIO, f"the store has {seen['ContentLength']} of {self._size} bytes, or another file")
        self._started = False

    def discard(self) -> None:
        """Give up; no part stays in flight or in the store."""
        # First wait: a part that arrives after the abort would stay in the store.
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
        if self._started:
            # Two cases are still listed: a part arrived after the abort, or the answer with the upload's id got lost.
            self._upload = None
            self._withdraw_others()
        self._started = False

    def _withdraw_others(self) -> None:
        """Remove the upload of a killed writer of this name, and one that a retry started a second time."""
        bucket, key = self._where["Bucket"], self._where["Key"]
        withdraw_uploads(self._begin_call, bucket, key, lambda name, upload: name == key and upload != self._upload)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._begin_call(method, **self._where, **arguments).result()

    def _send(self) -> None:
        if self._upload is None:
            # Before the request: if its answer is lost, the upload may exist all the same.
            self._started = True
            self._upload = self._call("create_multipart_upload")["UploadId"]
            self._withdraw_others()
        body = _Body(memoryview(self._part)[: self._filled])
        sent = self._begin_part(**self._where, UploadId=self._upload, PartNumber=self._number, Body=body)
        self._flying[sent] = (self._number, self._part)
        self._number += 1
        self._filled = 0
        self._collect_parts(len(self._flying) + 1 - STAGED)
        # After the wait for parts in flight, so that there are never more than STAGED of them.
        self._part = self._fresh(PART * 2 ** ((self._number - 1) // _DOUBLE_EVERY))

    def _collect_parts(self, least: int) -> None:
        """Record the tags of parts that have arrived; wait until there are at least `least` of them."""
        while self._flying:
            # With nothing to wait for, only what has arrived already is collected.
            done, _ = wait(self._flying, timeout=None if least > 0 else 0, return_when="FIRST_COMPLETED")
            if not done:
                return
            for future in done:
                number, part = self._flying.pop(future)
                self._tags[number] = future.result()["ETag"]
                self._idle.append(part)
            least -= len(done)

    def _fresh(self, size: int) -> mmap.mmap:
        """Return an empty part, a used one if possible: the page faults of new memory cost as much as copying."""
        while self._idle:
            part = self._idle.pop()
            if len(part) == size:
                return part
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _Body:
    """A part in the form that the client needs: readable more than once (to sign and to retry), and sent in slices."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = -1) -> memoryview:
        """Return the next bytes, without a copy."""
        end = len(self._view) if size is None or size < 0 else self._at + size
        data = self._view[self._at : end]
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        """Yield slices for the socket, because a whole part at once would be copied several times."""
        for start in range(0, len(self._view), _SLICE):
            yield self._view[start : start + _SLICE]


def withdraw_uploads(begin: Call, bucket: str, prefix: str, chosen: Callable[[str, str], bool]) -> None:
    """Remove the unfinished uploads below a prefix that `chosen` selects by key and upload id, if the store can."""
    with contextlib.suppress(Exception):
        listed = begin("list_multipart_uploads", Bucket=bucket, Prefix=prefix).result()
        for upload in listed.get("Uploads") or []:
            where = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
            if chosen(*where.values()):
                with contextlib.suppress(Exception):
                    begin("abort_multipart_upload", Bucket=bucket, **where).result()
