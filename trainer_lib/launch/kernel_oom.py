"""Tell an out-of-memory kill by the kernel from any other SIGKILL, by the counters that the kernel keeps."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from pathlib import Path

SAMPLE_S = 2.0


class OomWatch:
    """Watches the ``oom_kill`` counter of our control group (v1 or v2), or of the machine where we have none.

    A group's counter is of its own processes. The machine's also counts those of other groups and users, so only a rise
    in the last seconds before a death counts: call `sample_counters` while the workers run; `has_risen` compares with a
    sample at least `SAMPLE_S` seconds old.

    Args:
        root: the folder that holds /proc and /sys (a test gives its own).
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = _counter_files(root)
        self._older = self._newer = self._read()
        self._sampled = time.monotonic()

    def sample_counters(self) -> None:
        """Read the counters again when the last sample is old enough. Cheap; call it often."""
        now = time.monotonic()
        if now - self._sampled >= SAMPLE_S:
            self._older, self._newer = self._newer, self._read()
            self._sampled = now

    def has_risen(self) -> bool:
        """Whether the kernel killed a process for memory since the sample before the last."""
        # Not the newest sample: the kernel may count the kill a moment before we look.
        return any(now > before for before, now in zip(self._older, self._read(), strict=True))

    def _read(self) -> list[int]:
        return [_count(path) for path in self._files]


def _counter_files(root: Path) -> list[Path]:
    """Return memory.events (v2) and memory.oom_control (v1) of our groups; without one, the machine's vmstat file."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found += _nearest(root / "sys/fs/cgroup", path, "memory.events")
                found += _nearest(root / "sys/fs/cgroup/unified", path, "memory.events")
            elif "memory" in controllers.split(","):
                found += _nearest(root / "sys/fs/cgroup/memory", path, "memory.oom_control")
    return found or [root / "proc/vmstat"]


def _nearest(mount: Path, path: str, name: str) -> list[Path]:
    """Return the counter file of a group, or of the nearest above it: in a container, the root is our own group."""
    group = mount / path.strip("/")
    files = (folder / name for folder in (group, *group.parents) if folder.is_relative_to(mount))
    return list(itertools.islice(filter(Path.exists, files), 1))


def _count(path: Path) -> int:
    try:
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0
