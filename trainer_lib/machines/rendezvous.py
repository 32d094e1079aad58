"""The rendezvous of machines: a TCP store on the leading one, and the few keys that they exchange through it.

::

    request              the leading machine: what to do, and how many machines it wants
    arrivals  node/<n>   followers take the next number and describe themselves
    world                the leading machine: who takes part, in order of node rank; itself is 0
    alive/<n>            rises while a machine lives
    account/<n>          how its workers ended: their failure records, their exit codes
    accounts             how many have written that
    end                  the leading machine: stop your workers, the attempt is over
    stacks  stacks/<n>   the leading machine asks where the workers are; the machines' answers
    outcome              the leading machine: done, or failed and whether a new attempt follows
    outcome_read         how many machines have read that

Every value is JSON; nothing is unpickled. The same store serves torchrun's rendezvous and the workers' process group,
so machines need to reach one port only. It is new for every attempt: no key of an earlier one can mislead.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import ConfigError, InfrastructureError

POLL_S = 0.1
CONNECT_S = 5.0
LOST_S = 10.0  # seconds without a sign of life
OPERATION_S = 30.0  # seconds for one operation: the store may have vanished without closing its connections


class Lost(Exception):
    """The store cannot be reached any more: the leading machine, or the network between, is gone."""


def open_store(host: str, port: int) -> TCPStore:
    """Open a store in this process that listens on this address only; port 0 takes a free one.

    `torch.distributed.run` would bind a store of its own to every interface. `multi_tenant` stores share one server per
    port, so it takes this one instead.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(1024)
    return TCPStore(
        host,
        int(listener.getsockname()[1]),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=10),
        multi_tenant=True,  # torchrun, in this process, takes the same store
        master_listen_fd=listener.detach(),
    )


def reach(host: str, port: int) -> TCPStore | None:
    """Connect to the store at this address; None when no process listens there."""
    try:
        # It fails faster than the store does, and without a log line.
        socket.create_connection((host, port), timeout=CONNECT_S).close()
        timeout = timedelta(seconds=OPERATION_S)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (OSError, DistError, RuntimeError):
        return None


class Rendezvous:
    """One machine's view of the store. Every method raises `Lost` when the store is gone. Values are JSON."""

    def __init__(self, store: TCPStore) -> None:
        # torch's own keys live in the same store.
        self._store = PrefixStore("trainflow", store)

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._try(lambda: self._store.set(key, json.dumps(value)))

    def get(self, key: str) -> Any:
        """Return the value of a key at once; None when it has none yet."""
        return self._try(lambda: parse_json(self._store.get(key)) if self._store.check([key]) else None)

    def get_all(self, keys: list[str]) -> list[Any]:
        """Return the values of keys that all have one, in one operation however many they are."""
        return [parse_json(value) for value in self._try(lambda: self._store.multi_get(keys))] if keys else []

    def add(self, key: str, more: int = 1) -> int:
        """Add to a number and return the result; adding 0 only reads it."""
        return int(self._try(lambda: self._store.add(key, more)))

    def _try(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except (DistError, RuntimeError) as error:
            raise Lost(str(error).splitlines()[0]) from error


def gather(
    rendezvous: Rendezvous, least: int, most: int, *, patience_s: float, last_call_s: float, endpoint: str
) -> list[dict[str, Any]]:
    """Return the followers that take part, in order of node rank. The leading machine calls this; it is not among them.

    Waits for `most` machines; once `least` are there, `last_call_s` seconds after every arrival for one more. Raises
    InfrastructureError when too few came within `patience_s`, and ConfigError when two claim the same node rank.
    """
    started = changed = time.monotonic()
    pulses = Pulses(rendezvous, [])
    arrived: list[dict[str, Any]] = []
    while len(arrived) < most - 1:
        now, before = time.monotonic(), len(arrived)
        pulses.add(rendezvous.add("arrivals", 0))
        pulses.look()
        described = ((number, pulses.node(number)) for number in pulses.numbers if pulses.silent_s(number) < LOST_S)
        arrived = [node for _, node in described if node is not None]
        if len(arrived) != before:
            changed = now
        elif len(arrived) >= least - 1:
            if now - changed >= last_call_s:
                break
        elif now - started >= patience_s:
            came = ", ".join(str(node["host"]) for node in arrived) or "none"
            raise InfrastructureError(
                f"Only {len(arrived)} of {least - 1} other machine(s) came within {patience_s:.0f} s ({came}).",
                field="train.launch.rendezvous",
                value=endpoint,
                remedy="Start `trainflow join` on the others, see that they reach this address, or wait longer "
                "(train.launch.join_timeout_s).",
            )
        if len(arrived) < most - 1:
            time.sleep(POLL_S)
    return _seated(arrived[: most - 1])


class Pulses:
    """The signs of life of the followers `numbers`: one operation reads those of all."""

    def __init__(self, rendezvous: Rendezvous, numbers: Iterable[int]) -> None:
        self.numbers = list(numbers)
        self._rendezvous = rendezvous
        self._since = dict.fromkeys(self.numbers, time.monotonic())
        self._beats: dict[int, Any] = {}  # of those that have given one: their keys stay
        self._nodes: dict[int, dict[str, Any]] = {}

    def add(self, newest: int) -> None:
        """Watch the followers up to this number as well."""
        for number in range(len(self.numbers) + 1, newest + 1):
            self.numbers.append(number)
            self._since[number] = time.monotonic()

    def look(self) -> None:
        """Read the newest signs of life."""
        for number in self.numbers:
            if number not in self._beats and (beat := self._rendezvous.get(f"alive/{number}")) is not None:
                self._beats[number], self._since[number] = beat, time.monotonic()
        beats = self._rendezvous.get_all([f"alive/{number}" for number in self._beats])
        for (number, before), beat in zip(list(self._beats.items()), beats, strict=True):
            if beat != before:
                self._beats[number], self._since[number] = beat, time.monotonic()

    def node(self, number: int) -> dict[str, Any] | None:
        """Return how a follower described itself; None when it has only taken its number so far."""
        if number not in self._nodes and (node := self._rendezvous.get(f"node/{number}")) is not None:
            self._nodes[number] = node
        return self._nodes.get(number)

    def silent_s(self, number: int) -> float:
        """Return the seconds since a follower's last sign of life that was read, by the clock of this machine."""
        return time.monotonic() - self._since[number]


def _seated(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    claimed = Counter(node["node_rank"] for node in nodes if node["node_rank"] is not None)
    for rank, count in claimed.items():
        if count > 1:
            hosts = " and ".join(node["host"] for node in nodes if node["node_rank"] == rank)
            what, field = f"{hosts} claim the same place.", "train.launch.node_rank"
            raise ConfigError(what, field=field, value=rank, remedy="Number them.")
    # Those that did not choose come after those that did, as they arrived.
    return sorted(nodes, key=lambda node: (node["node_rank"] is None, node["node_rank"] or 0, node["number"]))
