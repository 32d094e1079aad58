"""Find the parameter names of an optimizer's state in which parameters are only numbered.

torch numbers parameters through the groups, in the order in which the optimizer got them, which is the model's order. A
file of weights has names, but safetensors sorts them. If the model can be built, its order decides (`choose_names`).
Otherwise names are assigned to numbers only if exactly one assignment fits the shapes, and the order if the file kept
it (`derive_names`): a wrong assignment would train on silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer_lib.distributed.xla import memory_address
from trainer_lib.errors import ConfigError

Names = list[list[str]]
"""Parameter names by group, in the order of the group's numbers."""
Shape = tuple[int, ...]

# State tensors of torch's optimizers that have the parameter's shape.
_LIKE_THE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "max_exp_avg_sq", "acc_delta")
_STATES = 100_000
"""The most partial assignments that are followed before the search gives up."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in an optimizer's state.

    Attributes:
        number: the parameter's number.
        shape: the parameter's shape; None when its state holds no tensor of that shape.
    """

    number: int
    shape: Shape | None

    def fits(self, shape: Shape) -> bool:
        """Whether a parameter of that shape may be the one with this number."""
        return self.shape is None or self.shape == shape


def list_slots(state: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[list[Slot]]:
    """List the slots of each group, in order; `state` and the ``params`` of `groups` are by number."""
    return [[Slot(number, _shape(state.get(number, {}))) for number in group["params"]] for group in groups]


def _shape(values: Mapping[str, Any]) -> Shape | None:
    for key in _LIKE_THE_PARAMETER:
        if isinstance(tensor := values.get(key), Tensor):
            return tuple(tensor.shape)
    return None


def choose_names(candidates: Sequence[Names], slots: Sequence[Sequence[Slot]], shapes: Mapping[str, Shape]) -> Names:
    """Choose the one candidate that fits the slots: as many names in each group, in the shapes of the state.

    Args:
        candidates: ways in which the model's parameters may have been divided into groups, in the model's order.
        slots: the slots of each group.
        shapes: the shapes of the model's parameters by name.

    Raises:
        ConfigError: no candidate fits (another model), or several different ones fit.
    """
    fitting: list[Names] = []
    for names in candidates:
        # Two candidates may be the same names: then it does not matter which one is meant.
        if names not in fitting and _fits(names, slots, shapes):
            fitting.append(names)
    if len(fitting) == 1:
        return fitting[0]
    sizes = [len(group) for group in slots]
    if not fitting:
        offered = " or ".join(str([len(group) for group in names]) for names in candidates)
        raise _refused(
            f"The optimizer's groups have {sizes} parameters; the model's would have {offered}, or other shapes.",
            "Give the model as it was trained (--model), with the same parameters frozen.",
        )
    raise _refused(
        f"The model's parameters fit the optimizer's groups of {sizes} in more than one way.",
        "The transformers Trainer does not make these groups by itself; train on from the weights.",
    )


def _fits(names: Names, slots: Sequence[Sequence[Slot]], shapes: Mapping[str, Shape]) -> bool:
    if [len(group) for group in names] != [len(group) for group in slots]:
        return False
    flat_names, flat_slots = [name for group in names for name in group], [slot for group in slots for slot in group]
    return all(slot.fits(shapes[name]) for slot, name in zip(flat_slots, flat_names, strict=True))


def derive_names(
    tensors: Mapping[str, Tensor], slots: Sequence[Sequence[Slot]], *, in_order: bool, decays: Callable[[str], bool]
) -> Names:
    """Derive the names from the weights alone, without the model.

    Args:
        tensors: the weights: name → tensor `[...]`, including buffers and frozen parameters, which have no slot.
        slots: the slots of each group.
        in_order: whether `tensors` are in the model's order.
        decays: whether a name may be in the first of two groups, the one with weight decay.

    Raises:
        ConfigError: no assignment fits, or several do.
    """
    weights = _distinct(tensors)
    # Two groups are the reference's: the first decays, the second does not.
    may = [decays, _accept_any] if len(slots) == 2 else [_accept_any] * len(slots)
    ways = _ways_in_order(weights, slots, may) if in_order else _ways_by_shape(weights, slots, may)
    if len(ways) == 1:
        return ways[0]
    raise _refused(
        "The names of the parameters that the optimizer numbers cannot be found: "
        + ("no names of the weights fit." if not ways else "several names of the weights fit one number."),
        "Give the model: --model FILE.py:FUNCTION, a function of yours that returns it as it was trained.",
    )


def _accept_any(name: str) -> bool:
    return True


def _distinct(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Names and shapes of the tensors that may be parameters; tied weights by their first name."""
    seen: set[tuple[int, Shape]] = set()
    found = {}
    for name, tensor in tensors.items():
        key = (memory_address(tensor), tuple(tensor.shape))
        # Empty tensors all have one address, so they are not ties.
        if (tensor.is_floating_point() or tensor.is_complex()) and not (tensor.numel() and key in seen):
            seen.add(key)
            found[name] = tuple(tensor.shape)
    return found


def _ways_by_shape(
    weights: Mapping[str, Shape], slots: Sequence[Sequence[Slot]], may: Sequence[Callable[[str], bool]]
) -> list[Names]:
    """Assign names by shape alone: no way, one way, or two that stand for many.

    One way exists if every slot is left with exactly one name.
    """
    fitting = [
        [[name for name, shape in weights.items() if slot.fits(shape) and allowed(name)] for slot in group]
        for group, allowed in zip(slots, may, strict=True)
    ]
    taken: set[str] = set()
    # A slot with one possible name takes it, which may leave another slot with one, and so on.
    while True:
        decided = {options[0] for group in fitting for options in group if len(options) == 1}
        if decided == taken:
            break
        taken = decided
        for group in fitting:
            for place, options in enumerate(group):
                if len(options) > 1:
                    group[place] = [name for name in options if name not in taken]
    counts = [len(options) for group in fitting for options in group]
    if 0 in counts or len(taken) < sum(count == 1 for count in counts):
        return []
    names = [[options[0] for options in group] for group in fitting]
    # Twice the same: the caller only needs to see that there is more than one.
    return [names] if max(counts, default=1) == 1 else [names, names]


def _ways_in_order(
    weights: Mapping[str, Shape], slots: Sequence[Sequence[Slot]], may: Sequence[Callable[[str], bool]]
) -> list[Names]:
    """Assign names to the groups in their order: no way, one way, or two that stand for many.

    Each group is filled from its first slot on; a name may also be left over (a buffer, a frozen parameter). Dynamic
    programming over the number of filled slots per group: two ways per state are enough to see that a way is not the
    only one.
    """
    spare = len(weights) - sum(len(group) for group in slots)
    start = tuple(0 for _ in slots)
    reached: dict[tuple[int, ...], list[tuple[int, ...]]] = {start: [()]}  # filled slots -> up to two ways there
    for number, (name, shape) in enumerate(weights.items()):
        following: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for filled, ways in reached.items():
            choices = [
                place
                for place, group in enumerate(slots)
                if filled[place] < len(group) and group[filled[place]].fits(shape) and may[place](name)
            ]
            if number - sum(filled) < spare:
                choices.append(-1)  # left over
            for place in choices:
                after = tuple(count + (index == place) for index, count in enumerate(filled))
                known = following.setdefault(after, [])
                # Two ways are as good as many: the answer is then "ambiguous".
                known.extend((*way, place) for way in ways[: 2 - len(known)])
        reached = following
        if len(reached) > _STATES:
            return [[], []]  # too many to follow, so certainly not only one
    ways = reached.get(tuple(len(group) for group in slots), [])
    listed = list(weights)
    return [
        [[name for name, to in zip(listed, way, strict=True) if to == place] for place in range(len(slots))]
        for way in ways
    ]


def _refused(message: str, remedy: str) -> ConfigError:
    return ConfigError(message, field="model", remedy=remedy)
