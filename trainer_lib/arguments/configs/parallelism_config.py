"""The grid of processes, and the arguments that lay it out: `parallelism` and `parallelism_config`.

::

    parallelism   accelerate's ParallelismConfig   transformers' DistributedConfig   processes that …
    replicate     dp_replicate_size                dp_replicate_size                 hold copies of the model
    shard         dp_shard_size                    fsdp_size                         hold rows of every parameter
    expert        -                                ep_size, a part of fsdp_size      hold experts, and are sent tokens
    sequence      sp_size                          -                                 compute a part of all rows
    tensor        tp_size                          tp_size                           compute a part of every layer
    plan          -                                tp_plan                           the layers that `tensor` divides

Ranks count the last dimension fastest, so processes that exchange most are neighbours. Samples are divided over
`replicate` x `shard` x `expert` processes; those of one tensor or sequence group see the same ones, whose number is
the data rank. A plan maps patterns of modules' names ("layers.*.up") to styles; without one the model's own
counts. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainer_lib.arguments.coerce import coerce
from trainer_lib.arguments.configs.fsdp_config import KEPT, FsdpSettings, read_settings, refuse_unshardable
from trainer_lib.base.suggestions import require_known, suggestion
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.arguments.groups import ArgumentGroups

DIMENSIONS = ("replicate", "shard", "expert", "sequence", "tensor")
"Names of the dimensions, the outermost first."
DATA = ("replicate", "shard", "expert")
"The dimensions along which processes train on different samples."


class Grid:
    """All processes, seen from one of them; dimensions are in their order, sizes and coordinates by their names.

    Attributes:
        data_size: number of shares of the data.
        data_rank: number of this process's share.
    """

    def __init__(self, sizes: Mapping[str, int], rank: int = 0) -> None:
        """Lay out the processes; the dimensions that `sizes` leaves out have the size 1."""
        self.sizes = {name: sizes.get(name, 1) for name in DIMENSIONS}
        self.rank, self.size = rank, math.prod(self.sizes.values())
        self.coordinates = self.coordinates_of(rank)
        self.data_size, self.data_rank = 1, 0
        for name in DATA:
            self.data_size *= self.sizes[name]
            self.data_rank = self.data_rank * self.sizes[name] + self.coordinates[name]

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return the place of a rank in every dimension."""
        places = {}
        for name in reversed(DIMENSIONS):
            rank, places[name] = divmod(rank, self.sizes[name])
        return {name: places[name] for name in DIMENSIONS}

    @property
    def shares_samples(self) -> bool:
        """Whether several processes train on the same samples."""
        return self.data_size < self.size

    def describe(self, rank: int | None = None) -> str:
        """Return the coordinates of a rank, by default this process's, as text: "tensor=1, shard=0"."""
        places = self.coordinates if rank is None else self.coordinates_of(rank)
        return ", ".join(f"{name}={places[name]}" for name in reversed(DIMENSIONS) if self.sizes[name] > 1)


FIELD, PEERS = "parallelism", "parallelism_config"
#: Words of plans for a layer, and what they do with it.
STYLES: Mapping[str, str] = {
    "colwise": "rows of the weight; the output stays divided",
    "rowwise": "columns of the weight, for a divided input; the outputs are summed",
    "colwise_gather_output": "rows of the weight; the output is gathered",
    "rowwise_split_input": "columns of the weight; the input is divided",
    "embedding_rowwise": "rows of an embedding; the outputs are summed",
    "embedding_colwise": "columns of an embedding; the output is gathered",
    "replicated_with_grad_allreduce": "a whole weight for a divided input; its gradients are summed",
}
_OLD_STYLES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_NAMES = {
    **{name: name for name in ("replicate", "shard", "tensor", "sequence", "expert", "plan")},
    "dp_replicate_size": "replicate",
    "dp_shard_size": "shard",
    "fsdp_size": "shard",
    "tp_size": "tensor",
    "sp_size": "sequence",
    "ep_size": "expert",
    "tp_plan": "plan",
    "cp_size": "context",
    "pp_size": "pipeline",
}
_UNSERVED = {
    "context": ("There is no ring attention.", "Use sequence, which divides tokens, and heads in the attention."),
    "pipeline": ("Layers do not form a pipeline.", "Use tensor inside of a machine and shard across machines."),
}
# Of the peers' classes: what says how, and not how many.
_ASIDE = ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler", "device_mesh", "ep_implementation")
_ELSEWHERE = {
    "fsdp_cpu_offload": 'Give fsdp="full_shard offload".',
    "fsdp_mixed_precision": "Give bf16=True.",
    "fsdp_plan": "Give fsdp_config = {transformer_layer_cls_to_wrap: [...]}.",
    "ep_plan": "Remove it.",
    "enable_sequence_parallel": "Remove it.",
    "enable_expert_parallel": "Remove it.",
}
# Arguments that divided layers and experts do not serve: the reason, and the alternative.
_WITH_TENSOR = {
    "fp16": ("The loss scaler does not know divided parameters.", "Use bf16=True."),
    "torch_compile": ("No test has shown it compiled.", "Remove it."),
    "use_liger_kernel": ("Its kernels need whole weights.", "Remove it."),
}
_UNSERVED_WITH = {
    "sequence": {
        "fsdp": ("Parameters stay whole.", "Remove it."),
        "fp8": ("Scales would be those of a part of the tokens.", "Use bf16=True alone."),
        "torch_compile": ("No test has shown it compiled.", "Remove it."),
        "use_liger_kernel": ("Its loss needs whole rows.", "Remove it."),
        "predict_with_generate": ("Processes would generate whole rows, each the same.", "Generate after training."),
    },
    "expert": {**_WITH_TENSOR, "fp8": ("No test has shown it with experts.", "Use bf16=True alone.")},
    "tensor": _WITH_TENSOR,
}


class PeerSizes(dict[str, Any]):
    """The fields of a peer's object as a mapping, which can be written as JSON; each is an attribute too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self[name]

    @classmethod
    def of(cls, given: Any) -> PeerSizes | None:
        """Read a mapping or an object with these fields; None stays. Raises ConfigError for anything else."""
        if given is None:
            return None
        values = given if isinstance(given, Mapping) else getattr(given, "__dict__", None)
        if not isinstance(values, Mapping):
            what = "This is neither a mapping nor a ParallelismConfig."
            raise ConfigError(what, field=PEERS, value=given, remedy="Give for example {dp_shard_size: 4, tp_size: 2}.")
        handlers = ("handler", "mesh")
        return cls({k: v for k, v in values.items() if not str(k).startswith("_") and not str(k).endswith(handlers)})


@dataclass(frozen=True)
class Layout:
    """The sizes of the dimensions that were given, and the plan of the layers that `tensor` divides."""

    replicate: int = 1
    shard: int = 1
    expert: int = 1
    sequence: int = 1
    tensor: int = 1
    plan: Mapping[str, str] | None = None
    field: str = FIELD

    @property
    def data_size(self) -> int:
        """The number of processes that train on different samples."""
        return self.replicate * self.shard * self.expert

    @property
    def processes(self) -> int:
        """The number of all processes."""
        return self.data_size * self.sequence * self.tensor

    @property
    def shards(self) -> int:
        """The number of processes that hold different rows of a parameter."""
        return self.shard * self.expert * (self.sequence if self.shard > 1 else 1)

    def sizes(self) -> dict[str, int]:
        """Return the dimensions of a mesh; a copy that is divided by no one is a shard of one process."""
        sizes = {"replicate": self.replicate} if self.replicate > 1 else {}
        if self.shard > 1 or self.replicate > 1 or self.expert > 1:
            sizes["shard"] = self.shard
        if self.expert > 1:
            sizes["expert"] = self.expert
        if self.sequence > 1:
            sizes["sequence"] = self.sequence
        return {**sizes, **({"tensor": self.tensor} if self.tensor > 1 or not sizes else {})}


def read_layout(args: ArgumentGroups) -> Layout | None:
    """Return the sizes that were given; None when none were. Raises ConfigError for an unknown name or value."""
    layouts = [
        _read(field, given) for field, given in ((FIELD, args.parallelism), (PEERS, args.parallelism_config)) if given
    ]
    if len(layouts) == 2 and replace(layouts[1], field=FIELD) != layouts[0]:
        remedy = "Keep one of the two."
        raise ConfigError(f"This contradicts {PEERS}.", field=FIELD, value=str(args.parallelism), remedy=remedy)
    return layouts[0] if layouts else None


def _read(field: str, given: Mapping[str, Any]) -> Layout:
    values: dict[str, Any] = {}
    for key, value in given.items():
        name, path = _NAMES.get(key), f"{field}.{key}"
        if key in _ASIDE or value is None or (key in _ELSEWHERE and not value):
            continue
        if key in _ELSEWHERE:
            raise ConfigError("The setting is not read here.", field=path, value=str(value), remedy=_ELSEWHERE[key])
        if name is None:
            known = [*DIMENSIONS, "plan"] if field == FIELD else [name for name in _NAMES if name not in DIMENSIONS]
            raise ConfigError("No dimension has this name.", field=path, remedy=suggestion(str(key), known))
        values[name] = _read_plan(path, value) if name == "plan" else _read_size(path, value)
        if name in _UNSERVED and values[name] > 1:
            message, remedy = _UNSERVED[name]
            raise ConfigError(message, field=path, value=value, remedy=remedy)
    if "ep_size" in given and values.get("shard", 1) > 1:  # as in transformers: over a part of the `fsdp_size` ones
        shard, experts = values["shard"], values["expert"]
        if shard % experts:
            what = f"The {shard} processes of fsdp_size cannot be grouped by {experts}."
            raise ConfigError(what, field=f"{field}.ep_size", value=experts, remedy="Give a divisor.")
        values["shard"] = shard // experts
    return Layout(**{name: value for name, value in values.items() if name not in _UNSERVED}, field=field)


def _read_size(field: str, value: Any) -> int:
    size: int = coerce(value, int, field=field)
    if size < 1:
        raise ConfigError("A dimension has at least one process.", field=field, value=size, remedy="Give 1 or more.")
    return size


def _read_plan(field: str, value: Any) -> dict[str, str] | None:
    if value == "auto":
        return None
    if not isinstance(value, Mapping):
        remedy = 'Give patterns and styles, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}.'
        raise ConfigError("This is not a plan.", field=field, value=value, remedy=remedy)
    plan = {str(pattern): _OLD_STYLES.get(str(style), str(style)) for pattern, style in value.items()}
    for pattern, style in plan.items():
        require_known(style, STYLES, "No style has this name.", field=f"{field}.{pattern}")
    return plan


def check_layout(args: ArgumentGroups) -> None:
    """Raise ConfigError for sizes that cannot be served, alone or with the other arguments."""
    layout = read_layout(args)
    if layout is None:
        return
    if args.deepspeed:
        what = "DeepSpeed lays out the processes itself."
        raise ConfigError(what, field=layout.field, value=str(layout.sizes()), remedy="Keep one.")
    if args.fsdp and layout.shards == 1 and str(args.fsdp).split()[0] != "no_shard":
        remedy = "Remove it, or give shard."
        raise ConfigError(f"{layout.field} has no shards.", field="fsdp", value=args.fsdp, remedy=remedy)
    if layout.expert > 1 and layout.tensor > 1:
        raise ConfigError(
            "Experts are divided where all other layers are whole.",
            field=f"{layout.field}.{'expert' if layout.field == FIELD else 'ep_size'}",
            value=layout.expert,
            remedy="Remove tensor, or give shard instead of it.",
        )
    if layout.shards > 1 or layout.tensor > 1:
        refuse_unshardable(args, layout.field)
    for size, unserved in _UNSERVED_WITH.items():
        if getattr(layout, size) > 1:
            _refuse_with(size, layout, unserved, args)


def _refuse_with(size: str, layout: Layout, unserved: Mapping[str, tuple[str, str]], args: ArgumentGroups) -> None:
    for other in ("expert", "tensor") if size == "sequence" else ():
        if getattr(layout, other) > 1:
            what = f"This is not supported together with {other}."
            remedy = "Give shard and sequence, or shard and tensor."
            raise ConfigError(what, field=f"{layout.field}.{size}", value=layout.sequence, remedy=remedy)
    for name, (why, remedy) in unserved.items():
        value = getattr(args, name, None)
        if value and not (name == "fsdp" and layout.shards > 1):
            what = f"This is not supported together with {size}: {why}"
            raise ConfigError(what, field=name, value=value, remedy=remedy)


def settings_of(args: ArgumentGroups) -> FsdpSettings | None:
    """Return the settings of sharding: those of `fsdp`, with the mode that the sizes ask for; None without either."""
    layout, settings = read_layout(args), read_settings(args)
    if layout is None or (layout.shards == layout.tensor == 1 and settings is None):
        return settings
    mode = "no_shard" if layout.shards == 1 else "full_shard" if layout.replicate == 1 else "hybrid_shard"
    if settings is not None and not settings.reshards:
        mode = KEPT.get(mode, mode)
    if settings is None:
        formats = {"param_dtype": "bfloat16", "reduce_dtype": "float32"} if args.bf16 else {}
        settings = FsdpSettings(wrap="known", **formats)  # type: ignore[arg-type]
    return replace(settings, mode=mode, hybrid_group=layout.shards if "hybrid" in mode else None)


def mesh_sizes(args: ArgumentGroups, *, world_size: int, local_world_size: int) -> dict[str, int]:
    """Return the size of every dimension of the mesh that these arguments ask for. Raises ConfigError."""
    layout = read_layout(args)
    if layout is not None:
        product = layout.processes
        if product != world_size:
            spread = "shard" if layout.sequence == 1 else "replicate"
            rest, more = divmod(world_size, product // getattr(layout, spread))
            raise ConfigError(
                f"Its product is {product}, and there are {world_size} processes.",
                field=layout.field,
                value=", ".join(f"{name}: {size}" for name, size in layout.sizes().items()),
                remedy=f"Start {product} processes" + (f", or give {spread} {rest}." if not more and rest else "."),
            )
        return layout.sizes()
    settings = read_settings(args) if args.fsdp else None
    if settings is None or settings.mode == "no_shard":
        return {"replicate": world_size, "shard": 1}
    if "hybrid" not in settings.mode:
        return {"shard": world_size}
    group = settings.hybrid_group or local_world_size
    if world_size % group:
        what = f"This group size does not divide {world_size} processes evenly."
        remedy = "Give a divisor of the number of processes."
        raise ConfigError(what, field="fsdp_config.hybrid_group_size", value=group, remedy=remedy)
    return {"replicate": world_size // group, "shard": group}


def data_size(args: ArgumentGroups, processes: int) -> int:
    """Return how many of so many processes train on different samples."""
    layout = read_layout(args)
    return processes if layout is None else layout.data_size


def is_laid_out(args: ArgumentGroups, processes: int) -> bool:
    """Return whether sizes were given, and are those of so many processes."""
    layout = read_layout(args)
    return layout is not None and layout.processes == processes


def check_processes(args: ArgumentGroups, processes: int) -> None:
    """Raise ConfigError unless the sizes that were given are those of so many processes."""
    if read_layout(args) is not None:
        mesh_sizes(args, world_size=processes, local_world_size=processes)
