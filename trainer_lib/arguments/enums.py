"""The closed vocabularies of the arguments. Each member compares equal to, prints and serialises as, its text."""

from __future__ import annotations

from enum import Enum, StrEnum

from typing_extensions import override


class IntervalStrategy(StrEnum):
    """When something repeats during training."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(StrEnum):
    """When a checkpoint is written; `best` = whenever an evaluation improves on the best metric."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class HubStrategy(StrEnum):
    """Pushes to the hub during training."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class HPSearchBackend(StrEnum):
    """The libraries that propose hyperparameters."""

    OPTUNA = "optuna"
    RAY = "ray"


class DebugOption(StrEnum):
    """Expensive diagnostics that `debug` switches on."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"


class FSDPOption(StrEnum):
    """The words of the `fsdp` argument."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    OFFLOAD = "offload"
    AUTO_WRAP = "auto_wrap"


class SamplingStrategy(StrEnum):
    """The order in which training samples are visited."""

    RANDOM = "random"
    SEQUENTIAL = "sequential"
    GROUP_BY_LENGTH = "group_by_length"


class ParallelMode(StrEnum):
    """The kind of parallelism of this process. Equal to the member of transformers' class with the same value."""

    NOT_PARALLEL = "not_parallel"
    # Never returned here: each process uses one device. Code for the reference compares with it.
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"

    @override
    def __eq__(self, other: object) -> bool:
        # Theirs is not a text, and their Trainer compares it with what our arguments return.
        theirs = isinstance(other, Enum) and type(other).__name__ == "ParallelMode"
        return str.__eq__(self, other.value if isinstance(other, Enum) and theirs else other)

    __hash__ = StrEnum.__hash__


class SchedulerType(StrEnum):
    """Learning-rate schedules; the formulas are in `trainer_lib.optim.lr_schedules`."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    GREEDY = "greedy"


class OptimizerNames(StrEnum):
    """Optimizers by name; `trainer_lib.optim.optimizers` says which package serves each."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    ADAMW_TORCH_XLA = "adamw_torch_xla"
    ADAMW_TORCH_NPU_FUSED = "adamw_torch_npu_fused"
    ADAFACTOR = "adafactor"
    ADAMW_ANYPRECISION = "adamw_anyprecision"
    ADAMW_TORCH_4BIT = "adamw_torch_4bit"
    ADAMW_TORCH_8BIT = "adamw_torch_8bit"
    ADEMAMIX = "ademamix"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    # Two names of one optimizer, as in the reference.
    ADAMW_BNB = "adamw_bnb_8bit"
    ADAMW_8BIT = "adamw_8bit"
    ADEMAMIX_8BIT = "ademamix_8bit"
    LION_8BIT = "lion_8bit"
    # As in the reference, LION is bitsandbytes' 32-bit class; LION_TORCH below needs no package.
    LION = "lion_32bit"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_ADEMAMIX_8BIT = "paged_ademamix_8bit"
    PAGED_LION = "paged_lion_32bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    RMSPROP = "rmsprop"
    RMSPROP_BNB = "rmsprop_bnb"
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"
    GALORE_ADAMW = "galore_adamw"
    GALORE_ADAMW_8BIT = "galore_adamw_8bit"
    GALORE_ADAFACTOR = "galore_adafactor"
    GALORE_ADAMW_LAYERWISE = "galore_adamw_layerwise"
    GALORE_ADAMW_8BIT_LAYERWISE = "galore_adamw_8bit_layerwise"
    GALORE_ADAFACTOR_LAYERWISE = "galore_adafactor_layerwise"
    LOMO = "lomo"
    ADALOMO = "adalomo"
    GROKADAMW = "grokadamw"
    SCHEDULE_FREE_RADAM = "schedule_free_radam"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SCHEDULE_FREE_SGD = "schedule_free_sgd"
    APOLLO_ADAMW = "apollo_adamw"
    APOLLO_ADAMW_LAYERWISE = "apollo_adamw_layerwise"
    STABLE_ADAMW = "stable_adamw"
    # Beyond the reference: what torch.optim has, and a Lion that needs no package.
    ADAM = "adam"
    ADAMAX = "adamax"
    ADADELTA = "adadelta"
    ASGD = "asgd"
    NADAM = "nadam"
    RADAM = "radam"
    RPROP = "rprop"
    LION_TORCH = "lion"
    MUON = "muon"
    # torchao's, for weights in bfloat16: its state has their format, and it rounds them at random.
    ADAMW_TORCH_BF16_SR = "adamw_torch_bf16_sr"
