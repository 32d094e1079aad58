"""``python -m trainer_lib.launch HOST:PORT``: join the training that another machine leads, until it is done.

A job script starts this on every machine but the first. Exit codes are those of the failure's class (docs/failures.md).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from trainer_lib.errors import Interrupted, TrainflowError
from trainer_lib.launch.nodes import follow
from trainer_lib.launch.settings.config import LaunchConfig


def main(argv: list[str]) -> int:
    """Parse the command line and join the leading machine. Returns the exit code."""
    given: dict[str, Any] = vars(_parser().parse_args(argv))
    # Cut at the first "=" only: a value may hold more of them.
    given["env"] = dict(pair.split("=", 1) for pair in given.pop("env"))
    try:
        follow(LaunchConfig(**given), on_line=_print_line)
    except TrainflowError as error:
        # To stderr, so that a scheduler's log of the output stays the workers'.
        _print_line(f"{error.title}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return Interrupted.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer_lib.launch", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rendezvous", metavar="HOST:PORT", help="address of the leading machine")
    parser.add_argument("--node-rank", type=int, default=None, help="rank of this machine; unset: in order of arrival")
    parser.add_argument(
        "--processes", type=int, default="auto", help="workers on this machine; unset: one per GPU, or two"
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="CPU threads per worker; unset: the cores are divided"
    )
    parser.add_argument("--grace-s", type=float, default=60.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--join-timeout-s", type=float, default=600.0, help="seconds to wait for the leading machine")
    parser.add_argument("--interface", default=None, help="network interface for the workers' messages")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="an environment variable for the workers"
    )
    return parser


def _print_line(line: str, file: Any = None) -> None:
    stream = file or sys.stdout
    stream.write(f"{line}\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
