"""Arguments about several processes, devices and machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from trainer_lib.arguments.fields import Accepts, arg

if TYPE_CHECKING:
    _Sharding = str | bool | list[str] | None
else:
    _Sharding = Annotated[str | None, Accepts(str | bool | list[str] | None)]


@dataclass
class DistributedArguments:
    """The strategy that shares the work among processes, and its settings."""

    # Not in a key: where a parameter lies does not decide what is computed.
    fsdp: _Sharding = arg(
        "",
        "Shard the model over processes (FSDP): full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2 or "
        "no_shard, and optionally offload and auto_wrap, separated by spaces.",
        affects="nothing",
        bare=True,
    )
    fsdp_config: dict[str, Any] | str | None = arg(
        None, "Settings of FSDP: a mapping, or the name of a JSON file.", affects="nothing"
    )
    # In a key: it may choose optimizer, schedule and precision. `numeric` keeps these parts only.
    deepspeed: dict[str, Any] | str | None = arg(
        None, "Configuration of DeepSpeed: a mapping, or a JSON file. Giving one selects DeepSpeed.", affects="outputs"
    )
    # In a key, but `numeric` reduces it to the one setting that changes the order of additions.
    accelerator_config: dict[str, Any] | str | None = arg(
        None,
        "Batch handling: split_batches, dispatch_batches, even_batches, use_seedable_sampler, non_blocking, "
        "gradient_accumulation_kwargs, use_configured_state; a mapping, or a JSON file.",
        affects="weights",
    )
    parallelism_config: Any = arg(None, "Sizes of the parallel dimensions (data, tensor, context).", affects="nothing")
    ddp_backend: str | None = arg(
        None,
        "Communication library; follows from the device when not given.",
        affects="nothing",
        choices=("nccl", "gloo", "mpi", "ccl", "xccl", "hccl", "cncl", "mccl"),
    )
    # Half an hour is the reference's default.
    ddp_timeout: int = arg(
        1800, "How long a collective may take before the run fails.", affects="nothing", unit="seconds", ge=1
    )
    ddp_find_unused_parameters: bool | None = arg(
        None,
        "Look for parameters without a gradient at every step; when not given, on unless activations are recomputed.",
        affects="nothing",
    )
    ddp_bucket_cap_mb: int | None = arg(
        None, "Size of the buckets in which gradients are exchanged.", affects="nothing", unit="MiB", ge=1
    )
    ddp_broadcast_buffers: bool | None = arg(
        None, "Copy buffers (batch-norm statistics) from the first process at every step.", affects="weights"
    )
    ddp_static_graph: bool | None = arg(
        None, "Promise that every step uses the same parameters, for speed.", affects="nothing"
    )
    local_rank: int = arg(
        -1, "Accepted from older launchers; ranks come from the environment.", affects="nothing", unit="rank", ge=-1
    )
