"""What a command waits for beside its work: answers of the embedded server, and looks for garbage."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Iterator

import pytest

from flows.server import embedded
from flows.server.api import _imports_set_aside


def test_answers_do_not_wait_for_the_acknowledgement_of_their_first_packet() -> None:
    """asyncio turns Nagle's algorithm off only for sockets that name their protocol: 40 ms for each request."""

    async def options() -> list[int]:
        found: list[int] = []

        def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.write(b"x")
            writer.close()

        listener = embedded._listen_on(0)
        async with await asyncio.start_server(note, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == b"x"
            writer.close()
        return found

    (no_delay,) = asyncio.run(options())
    assert no_delay != 0


@pytest.fixture
def looked_at() -> Iterator[None]:
    """Leaves nothing set aside behind, whatever a test of this process did before."""
    before = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if before:
        gc.freeze()


def test_imports_are_not_looked_at_inside_a_command_and_are_afterwards(looked_at: None) -> None:
    with _imports_set_aside():
        assert gc.get_freeze_count() > 1000
        with _imports_set_aside():
            pass
        assert gc.get_freeze_count() > 1000  # the outer block's
    assert gc.get_freeze_count() == 0


def test_what_a_process_has_set_aside_itself_stays_so(looked_at: None) -> None:
    gc.freeze()
    with contextlib.suppress(ValueError), _imports_set_aside():
        raise ValueError
    assert gc.get_freeze_count() > 1000
