"""An embedded server that loads while its command loads: each takes seconds, and neither has to wait for the other.

Whether a server is needed is known only once Prefect's settings are read, and Prefect takes a second to import. So
`EarlyServer.start` looks at the plainest signs, and where nothing speaks against it starts a process that imports the
server (`flows.server.embedded`). The membership then says where it is to serve, or it is not wanted and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from flows.server import embedded
from trainer_lib.locks.file_lock import is_locked

# Where a server of one's own may be configured, besides the environment.
_PROJECT_FILES = ("prefect.toml", "pyproject.toml", ".env")
_WORDS = (b"prefect_api_url", b"tool.prefect", b"[api]", b"api.url")


class EarlyServer:
    """A process that loads Prefect's server, and waits for the folder to serve in."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process: subprocess.Popen[bytes] | None = process

    @classmethod
    def start(cls) -> EarlyServer | None:
        """Start one, unless there are signs that none is needed: a configured server, or an embedded one that lives."""
        home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
        if not _seems_needed(home):
            return None
        command = [sys.executable, "-P", str(Path(embedded.__file__).resolve()), "--early", str(home / "trainflow")]
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                command,
                cwd="/",  # Prefect reads settings from the working directory, which the membership sends as variables
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            return cls(process)
        return None

    def serve(self, folder: Path, log: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Let it serve in `folder`; return its process, or None when it has ended before.

        Args:
            log: an existing file for what it prints.
            environ: its variables, besides those of this process.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None  # noqa: S101
        orders = {"folder": str(folder), "log": str(log), "environ": dict(environ)}
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(orders).encode() + b"\n")
        except OSError:  # it could not load
            process.wait()
            return None
        return process

    def close(self) -> None:
        """End it, if it does not serve."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # nothing is open in it yet
            process.communicate()


def _seems_needed(home: Path) -> bool:
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml")
    files = (profiles, *map(Path, _PROJECT_FILES))
    return not (
        os.environ.get("PREFECT_API_URL") or any(map(_speaks_of_a_server, files)) or any(map(_is_taken, _locks(home)))
    )


def _speaks_of_a_server(path: Path) -> bool:
    with contextlib.suppress(OSError):
        text = path.expanduser().read_bytes().lower()
        return any(word in text for word in _WORDS)
    return False


def _locks(home: Path) -> list[Path]:
    return list((home / "trainflow").glob(f"*/{embedded.SERVER_LOCK}"))


def _is_taken(lock: Path) -> bool:
    with contextlib.suppress(OSError):
        return is_locked(lock)
    return False
