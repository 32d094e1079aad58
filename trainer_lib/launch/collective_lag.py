"""Which rank is behind, from the collective traces of a launch that made no progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Entered = dict[tuple[str, str], dict[int, int]]  # (backend, process group) -> rank -> collectives entered


def describe_lag(traces: Mapping[int, Any]) -> str:
    """Return one sentence about the ranks that did not enter a collective that others wait in; "" without any.

    Args:
        traces: the content of each rank's trace file, by rank.
    """
    for (backend, group), entered in _count_entered(traces).items():
        first, last = max(entered.values()), min(entered.values())
        if first == last or len(entered) < 2:
            continue
        behind = sorted(rank for rank, count in entered.items() if count == last)
        waiting = sorted(rank for rank, count in entered.items() if count > last)
        name = _name_of(traces[waiting[0]], backend, group, last + 1)
        return (
            f"{_ranks(behind)} did not enter collective {last + 1}{f' ({name})' if name else ''}, "
            f"where {_ranks(waiting).lower()} waited."
        )
    return ""


def _count_entered(traces: Mapping[int, Any]) -> Entered:
    found: Entered = {}
    for rank, trace in traces.items():
        for backend, recorder in _mapping(_mapping(trace).get("recorders")).items():
            for group, status in _mapping(_mapping(recorder).get("pg_status")).items():
                text = str(_mapping(status).get("last_enqueued_collective"))
                if text.isdigit():
                    found.setdefault((backend, group), {})[rank] = int(text)
    return found


def _name_of(trace: Any, backend: str, group: str, number: int) -> str | None:
    entries = _mapping(_mapping(_mapping(trace).get("recorders")).get(backend)).get("entries")
    for entry in entries if isinstance(entries, list) else []:
        if str(_mapping(entry).get("pg_id")) == group and entry.get("collective_seq_id") == number:
            return str(entry.get("profiling_name"))
    return None


def _ranks(ranks: list[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"Rank {numbers[0]}"
    return f"Ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
