"""``python -m trainer_lib.launch HOST:PORT``: this machine follows the one that leads there, until all is done.

What a job script starts on every machine but the first. Exit codes are those of the failure's class (docs/failures.md).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from trainer_lib.errors import Interrupted, TrainflowError
from trainer_lib.launch.config import LaunchConfig
from trainer_lib.launch.nodes import follow


def main(argv: list[str]) -> int:
    """Parse the command line and follow. Returns the exit code."""
    given: dict[str, Any] = vars(_parser().parse_args(argv))
    given["env"] = dict(pair.split("=", 1) for pair in given.pop("env"))
    try:
        follow(LaunchConfig(**given), on_line=_say)
    except TrainflowError as error:
        _say(f"{error.title}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return Interrupted.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer_lib.launch", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rendezvous", metavar="HOST:PORT", help="where the leading machine is met")
    parser.add_argument("--node-rank", type=int, default=None, help="place of this machine; as they come if unset")
    parser.add_argument("--processes", type=int, default="auto", help="workers here; one per GPU, or two, if unset")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads per worker; shared out if unset")
    parser.add_argument("--grace-s", type=float, default=60.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--join-timeout-s", type=float, default=600.0, help="seconds to wait for the leading machine")
    parser.add_argument("--interface", default=None, help="network interface of the workers' messages")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the workers")
    return parser


def _say(line: str, file: Any = None) -> None:
    stream = file or sys.stdout
    stream.write(f"{line}\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
