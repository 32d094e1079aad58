"""Fuzzing of everything that reads a checkpoint's bytes; `make fuzz FUZZ_CASES=2000 SEED=1` runs it for longer.

Real files are taken apart, changed in their own structure (a JSON value, a tensor's header, an instruction of a pickle,
a record of an archive) or in their bytes, and given to the reader. Allowed is a value or a `TrainflowError`, but not a
`CodeError` (somebody else's code raised). Not allowed: any other exception, more than `MEMORY_MIB` beyond what the
process had, more than `SECONDS` for one input.
"""

from __future__ import annotations

import json
import pickletools
import random
import signal
import struct
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tests.support.hostile import bounded, program_of, rezipped
from trainer_lib.errors import CodeError, TrainflowError

MEMORY_MIB = 1536
SECONDS = 20

INFINITY, NAN = float("inf"), float("nan")
NUMBERS: list[Any] = [0, -1, 1, 2**31, 2**61, 2**63, 2**64, -(2**63), 10**30, 1e308, INFINITY, NAN, 0.5, True]
TEXTS = ["", "a", "\0", "../x", "/etc/passwd", "__tensor__", "__tuple__", "__dict__", "x" * 5000, "\ud800", "NaN", "-1"]
VALUES = [*NUMBERS, *TEXTS, None, [], {}, [[]], [None] * 3, {"": ""}, {"__tensor__": "a"}, {"__tuple__": [1]}]


@dataclass
class Target:
    """A reader, and real inputs for it."""

    read: Callable[[bytes], object]  # takes the bytes; raises TrainflowError, or nothing
    seeds: list[bytes]  # real inputs
    mutate: Callable[[random.Random, bytes], bytes]  # makes another input of one, knowing the format


# -- changing ----------------------------------------------------------------------------------------------------------
def in_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, insert, repeat or overwrite some bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.choice([1, 4, 64]))
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.choice([1, 8, 200])] * rng.choice([1, 2, 50])
        elif kind == 4:
            del changed[at : at + rng.choice([1, 8, 200])]
        else:
            changed[at : at + 8] = struct.pack("<q", rng.choice([0, -1, 2**62, 255, 2**31]))
    return bytes(changed)


def in_json(rng: random.Random, data: bytes) -> bytes:
    """Change values, names or nesting of a JSON document; sometimes its bytes."""
    if rng.random() < 0.15:
        return in_bytes(rng, data)
    value = json.loads(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        value = _in_value(rng, value)
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b"[" * 5000 + data


def _in_value(rng: random.Random, value: Any) -> Any:
    """The value with one place in it changed."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        return _in_container(rng, value)
    if rng.random() < 0.05:
        return _nested(rng)
    if isinstance(value, str) and rng.random() < 0.5:
        return in_bytes(rng, value.encode("utf-8", "replace")).decode("utf-8", "replace")
    return rng.choice(VALUES)


def _in_container(rng: random.Random, value: Any) -> Any:
    changed, is_list = value.copy(), isinstance(value, list)
    place, other = (rng.choice([*range(len(value))] if is_list else [*value]) for _ in range(2))
    kind, name = rng.randrange(9), str(rng.choice(TEXTS))
    if kind == 0:
        del changed[place]
    elif kind == 1 and is_list:
        changed[place:place] = [changed[place]] * rng.choice([1, 3, 1000])
    elif kind == 1:
        changed[name] = changed.pop(place)
    elif kind == 2:
        changed.append(rng.choice(VALUES)) if is_list else changed.update({name: rng.choice(VALUES)})
    elif kind == 3:
        changed[place] = changed[other]
    else:
        changed[place] = _in_value(rng, changed[place])
    return changed


def _nested(rng: random.Random) -> Any:
    value: Any = rng.choice(VALUES)
    for _ in range(rng.choice([5, 100, 900])):
        value = [value] if rng.random() < 0.5 else {rng.choice(["a", "__tuple__"]): [value]}
    return value


def in_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Change the header as JSON, its length, or the bytes."""
    length = int.from_bytes(data[:8], "little")
    header, payload = data[8 : 8 + length], data[8 + length :]
    kind = rng.random()
    if kind < 0.2:
        return in_bytes(rng, data)
    changed = in_json(rng, header)
    if kind < 0.4:
        payload = in_bytes(rng, payload)
    said = len(changed) if kind < 0.9 else rng.choice([0, 1, 2**63, len(changed) - 1, len(changed) + 1])
    return (said % 2**64).to_bytes(8, "little") + changed + payload


def in_torch_file(rng: random.Random, data: bytes) -> bytes:
    """Change the pickle in the archive, instruction by instruction, or the archive's bytes."""
    if rng.random() < 0.25:
        return in_bytes(rng, data)
    program = bytearray(program_of(data))
    for _ in range(rng.choice([1, 1, 2, 4])):
        program = _in_program(rng, program)
    return rezipped(data, bytes(program))


def _in_program(rng: random.Random, program: bytearray) -> bytearray:
    """One instruction removed, repeated, moved, replaced; or bytes changed."""
    try:
        starts = [at for _, _, at in pickletools.genops(bytes(program)) if at is not None]
    except Exception:
        return bytearray(in_bytes(rng, bytes(program)))
    if len(starts) < 3 or rng.random() < 0.3:
        return bytearray(in_bytes(rng, bytes(program)))
    index = rng.randrange(1, len(starts) - 1)
    one = program[starts[index] : starts[index + 1]]
    other = rng.randrange(1, len(starts) - 1)
    kind = rng.randrange(5)
    if kind == 0:
        del program[starts[index] : starts[index + 1]]
    elif kind == 1:
        program[starts[other] : starts[other]] = one * rng.choice([1, 1, 3, 200])
    elif kind == 2:
        program[starts[index] : starts[index + 1]] = program[starts[other] : starts[other + 1]]
    elif kind == 3:
        words = [b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nload\n", b"cnumpy\ndtype\n", b"ctorch\nSize\n"]
        program[starts[index] : starts[index + 1]] = rng.choice(words)
    else:
        numbers = [b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"K\x00", b"\x8a\x09" + b"\xff" * 8 + b"\x00", b")R"]
        others = [bytes([code]) for code in b"(}]NQb0."]
        program[starts[index] : starts[index + 1]] = rng.choice([*numbers, *others])
    return program


# -- running -----------------------------------------------------------------------------------------------------------
class TooSlow(BaseException):
    """One input took longer than `SECONDS`. A BaseException, so that no reader catches it as one of its own."""


@contextmanager
def limits() -> Iterator[None]:
    """Allow a block `MEMORY_MIB` beyond what the process has now, and no input more time than `attempt` gives it."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, late)
    try:
        with bounded(MEMORY_MIB, seconds=INFINITY):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


def attempt(read: Callable[[bytes], object], data: bytes) -> str | None:
    """Read once. Returns None for a value or a refusal, or the traceback of an error that must not happen."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        read(data)
    except TrainflowError as error:
        return None if error.remedy and not isinstance(error, CodeError) else traceback.format_exc()
    except (Exception, TooSlow):
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def fuzz(targets: Mapping[str, Target], seed: int, cases: int) -> list[str]:
    """Read so many inputs of each target, which depend on the seed alone; what must not happen, with the input."""
    crashes = []
    with limits():
        for name, target in targets.items():
            rng = random.Random(f"{seed}/{name}")
            for number in range(cases):
                data = target.mutate(rng, rng.choice(target.seeds))
                if (error := attempt(target.read, data)) is not None:
                    crashes.append(f"{name}, case {number}: {error}\n{data.hex()}")
    return crashes
