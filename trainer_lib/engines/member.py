"""The part of one machine: the first leads the launch, the others follow it. An engine starts it on each machine.

``python -m trainer_lib.engines.member lead|follow JOB …``. It writes what it has to say to its output, one JSON object
a line, and the engine brings the lines of the leading member to the driver::

    {"started": "host:port"}     where the leading machine can be found
    {"line": …} {"event": …}     what the workers print and report
    {"result": …} {"failure": …} how it ended

SIGTERM and SIGUSR2, which clusters send before they take a machine back, have the workers save and end. With
``--guarded`` a SIGTERM also comes from the kernel, when the guard of the member is gone: nothing continues then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_lib import guard
from trainer_lib.base.json_text import parse_json, read_json
from trainer_lib.base.records import to_record
from trainer_lib.errors import InfrastructureError, Interrupted, Preempted, from_exception
from trainer_lib.launch.base import follow, launch
from trainer_lib.launch.settings.config import from_settings
from trainer_lib.launch.settings.variables import free_port
from trainer_lib.protocol.requests import read_request
from trainer_lib.trackers.spool import SPOOL_DIR, TRACKED_RUN

_stopped = threading.Event()


def main(argv: list[str]) -> int:
    """Lead or follow, to the end. Returns the exit code: 0, or that of the failure."""
    parser = argparse.ArgumentParser(prog="member")
    parser.add_argument("part", choices=("lead", "follow"))
    parser.add_argument("job", type=Path, help="file with the job; a file next to it has the leading machine's address")
    parser.add_argument("--host", default="127.0.0.1", help="address of this machine, under which the others find it")
    parser.add_argument("--nodes", required=True, help="machines that take part, or a range")
    parser.add_argument("--address", type=Path, required=True, help="file with the leading machine's address")
    parser.add_argument("--guarded", action="store_true", help="a guard has started it: nothing continues without it")
    given = parser.parse_args(argv)
    parent = os.getppid() if given.guarded else None
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: _stop(parent))
    tracked = os.environ.get(TRACKED_RUN)
    if tracked and parse_json(tracked).get("host") != socket.gethostname():
        os.environ.pop(SPOOL_DIR, None)  # metrics wait on this machine where another one's flow delivers them
    try:
        part = _lead if given.part == "lead" else _follow
        part(given)
    except BaseException as error:
        failure = from_exception(error)
        if isinstance(failure, Interrupted):  # a stop that the cluster asked for is not a failure of the work
            saved = "" if failure.step is None else f"; saved at step {failure.step}"
            what, remedy = f"The cluster asked the workers to stop{saved}.", "The same command continues."
            failure = Preempted(what, step=failure.step, remedy=remedy)
        _report(failure=failure.to_record())
        return failure.exit_code
    return 0


def _stop(parent: int | None) -> None:
    """Have the workers save and end; without the guard, end them at once."""
    # A worker that is asked to stop asks those of other machines as well, which have nothing to stop for.
    if parent is not None and os.getppid() != parent:
        guard.kill(guard.descendants(os.getpid()))
        os._exit(1)
    _stopped.set()


def _lead(given: argparse.Namespace) -> None:
    nodes: int | str = int(given.nodes) if given.nodes.isdigit() else given.nodes
    job = read_json(given.job, dict)
    config = replace(from_settings(job["config"]), nodes=nodes)
    endpoint = f"{given.host}:{free_port(given.host)}"
    if config.several_nodes:
        config = replace(config, rendezvous=endpoint, node_rank=0)
    temporary = given.address.with_suffix(f".{os.getpid()}")
    temporary.write_text(endpoint, encoding="utf-8")
    temporary.replace(given.address)  # the others may be waiting for it
    _report(started=endpoint)
    result = launch(
        read_request(job["request"]),
        config,
        env={},
        on_line=lambda line: _report(line=line),
        on_event=lambda event: _report(event=event),
        should_cancel=_stopped.is_set,
        # The machine may have several workers of one output; the job may be of a version that did not say so.
        shared=bool(job.get("shared", False)),
    )
    _report(result=to_record(result))


def _follow(given: argparse.Namespace) -> None:
    config = from_settings(read_json(given.job, dict)["config"])
    deadline = time.monotonic() + config.join_timeout_s
    while not given.address.exists():
        if _stopped.is_set():
            raise Interrupted("The machine was asked to stop.")
        if time.monotonic() > deadline:
            what = f"The leading machine gave no address within {config.join_timeout_s:.0f} s."
            remedy = "Wait longer, or look at what the leading machine has written."
            raise InfrastructureError(what, field="train.launch.join_timeout_s", remedy=remedy)
        time.sleep(0.05)
    config = replace(config, rendezvous=given.address.read_text(encoding="utf-8"), nodes="1:2", node_rank=None)
    follow(config, on_line=lambda line: _report(line=line), should_cancel=_stopped.is_set)


def _report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201 - this output is what the driver reads


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
