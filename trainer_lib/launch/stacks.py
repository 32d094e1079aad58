"""Where a hung rank stands, read from the stacks that faulthandler wrote."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.MULTILINE)
_MOST_PLACES = 3
_OURS = Path(__file__).resolve().parents[1]
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


def describe_places(stacks: Mapping[str, str]) -> str | None:
    """Return where the ranks stand, "rank 1 in collate (recipe.py:12), rank 0 in wait (ops.py:7)"; None if unknown.

    Args:
        stacks: rank -> what faulthandler wrote, the innermost frame of each thread first.
    """
    ranks_at: dict[str, list[int]] = {}
    for rank, text in stacks.items():
        place = _find_place(text)
        if place is not None:
            ranks_at.setdefault(place, []).append(int(rank))
    # The place of the fewest ranks first: usually one rank is stuck, and the others wait for it.
    ordered = sorted(ranks_at.items(), key=lambda item: (len(item[1]), item[1]))
    places = [f"{_name_ranks(sorted(ranks))} in {place}" for place, ranks in ordered[:_MOST_PLACES]]
    return ", ".join(places) or None


def _find_place(text: str) -> str | None:
    """The innermost frame of the user's code in the main thread, else its innermost frame."""
    # faulthandler writes the newest thread first, so the last one is the main thread.
    main = _THREAD.split(text)[-1]
    frames = _FRAME.findall(main)
    if not frames:
        return None
    file, line, function = next((frame for frame in frames if _is_users(frame[0])), frames[0])
    return f"{function} ({Path(file).name}:{line})"


def _is_users(file: str) -> bool:
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts) or file.startswith("<"):
        return False
    return not path.is_relative_to(_OURS) and not any(path.is_relative_to(folder) for folder in _STANDARD)


def _name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
