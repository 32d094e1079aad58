"""The error for damage in a committed file."""

from __future__ import annotations

from trainer_lib.errors import DamagedError


def damaged_file(where: str, reason: str) -> DamagedError:
    """The error for a committed file that is not as it was committed.

    Args:
        where: the file's URL.
        reason: what is wrong, a clause ("it is missing").
    """
    return DamagedError(
        f"The file is damaged: {reason}.",
        field=where,
        remedy="Use an earlier checkpoint (a resume does by itself), or restore the file.",
    )
