"""The keys of DeepSpeed's configuration: supported, derived or refused (docs/distributed.md has them as a table)."""

from __future__ import annotations

from collections.abc import Mapping

#: Key -> the argument that it follows from. A value in the file must be equal, or "auto".
BATCH_KEYS: Mapping[str, str] = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
#: Keys that `trainer_lib.arguments.deepspeed.deepspeed_config` translates.
MAPPED = (
    *BATCH_KEYS,
    *("gradient_clipping", "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
#: Keys that go to DeepSpeed as they are.
PASSED = (
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "flops_profiler", "log_level"),
    *("prescale_gradients", "gradient_predivide_factor", "communication_data_type", "aio"),
)
_REPORT = "Remove it, and name the tracker in report_to."
_NO_PLACE = "Remove it: the Trainer has no use for it."
#: Keys that DeepSpeed knows and that are refused here, with the alternative.
REFUSED: Mapping[str, str] = {
    "amp": "Remove it: NVIDIA Apex is discontinued. Give bf16=True or fp16=True, or the section bf16 or fp16.",
    "torch_autocast": "Remove it: give the section bf16 or fp16, or bf16=True.",
    "activation_checkpointing": "Remove it, and give gradient_checkpointing=True.",
    "tensorboard": _REPORT,
    "wandb": _REPORT,
    "comet": _REPORT,
    "csv_monitor": _REPORT,
    "checkpoint": "Remove it: checkpoints are trainflow's own, without pickle.",
    "load_universal_checkpoint": "Remove it: every checkpoint of trainflow resumes on any stage and world size.",
    "nebula": "Remove it: checkpoints are trainflow's own.",
    "data_types": "Remove it: gradients are accumulated in the format that the section bf16 or fp16 names.",
    "elasticity": "Remove it, and give global_batch_size: it holds for any number of processes.",
    "autotuning": _NO_PLACE,
    "compile": "Remove it: compiling together with DeepSpeed is not supported.",
    "curriculum_learning": _NO_PLACE,
    "data_efficiency": _NO_PLACE,
    "compression_training": _NO_PLACE,
    "quantize_training": _NO_PLACE,
    "progressive_layer_drop": _NO_PLACE,
    "eigenvalue": _NO_PLACE,
    "sparse_attention": _NO_PLACE,
    "sparse_gradients": _NO_PLACE,
    "hybrid_engine": _NO_PLACE,
    "pipeline": _NO_PLACE,
    "tensor_parallel": "Remove it: processes share only the data.",
    "sequence_parallel_size": "Remove it: processes share only the data.",
    "managed_gradient_accumulation": "Remove it: the Trainer decides when a step is complete.",
    "disable_allgather": _NO_PLACE,
    "use_data_before_expert_parallelism": _NO_PLACE,
    "graph_harvesting": _NO_PLACE,
    "gradient_allreduce_op": "Remove it: gradients are averaged, and the loss is weighted accordingly.",
    "dataloader_drop_last": "Remove it, and give the argument of that name.",
}

ZERO_MAPPED = ("stage", "cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory")
OFFLOADS = ("offload_optimizer", "offload_param")
#: Sizes whose "auto" follows from the model's hidden size.
ZERO_AUTO = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
#: Accepted and always on, whatever the file says: weights are always gathered for saving.
ZERO_ALWAYS_ON = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
ZERO_PASSED = (
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "contiguous_gradients"),
    *("round_robin_gradients", "sub_group_size", "ignore_unused_parameters", "use_multi_rank_bucket_allreduce"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold"),
    *("stage3_module_granularity_threshold", "stage3_allgather_sequential", "memory_efficient_linear", "leaf_module"),
    *("log_trace_cache_warnings", "pipeline_loading_checkpoint", "enable_sanity_checks"),
    *("parameter_alignment", "stage3_use_all_reduce_for_fetch_params", "override_module_apply"),
)
_OWN_FORMAT = "Remove it: checkpoints are trainflow's own, and load on any stage and number of processes."
_LOSSY = "Remove it: the exchange would lose digits, and the state could not be saved exactly."
ZERO_REFUSED: Mapping[str, str] = {
    "elastic_checkpoint": _OWN_FORMAT,
    "load_from_fp32_weights": _OWN_FORMAT,
    "legacy_stage1": "Remove it: stage 1 uses the present implementation.",
    "compute_grad_norm": "Remove it: the norm is needed to find steps that are not finite.",
    "zero_quantized_weights": _LOSSY,
    "zero_quantized_nontrainable_weights": _LOSSY,
    "zero_quantized_gradients": _LOSSY,
    "zeropp_loco_param": _LOSSY,
    "zero_hpz_partition_size": "Remove it: parameters are sharded over all processes.",
    "mics_shard_size": "Remove it: parameters are sharded over all processes (FSDP has hybrid_shard).",
    "mics_hierarchical_params_gather": "Remove it: parameters are sharded over all processes.",
    "zenflow": "Remove it: its steps are not those of the schedule.",
    "save_muon_momentum_buffer_in_memory": "Remove it: muon works on whole matrices, which ZeRO shards.",
}

#: Optimizers of DeepSpeed and torch that update each element by itself, so that ZeRO may shard them -> `optim`.
OPTIMIZERS: Mapping[str, str] = {
    "adam": "adamw_torch_fused",  # DeepSpeed's Adam decays like AdamW unless adam_w_mode is false
    "adamw": "adamw_torch_fused",
    "sgd": "sgd",
    "rmsprop": "rmsprop",
    "adadelta": "adadelta",
    "adamax": "adamax",
    "nadam": "nadam",
    "radam": "radam",
    "asgd": "asgd",
    "rprop": "rprop",
    "lion": "lion",
}
_WHOLE = "It works on whole matrices, which ZeRO shards: give AdamW, Adam, Lion or SGD."
REFUSED_OPTIMIZERS: Mapping[str, str] = {
    "onebitadam": "It cannot be combined with ZeRO, and needs kernels of its own: give AdamW or Adam.",
    "onebitlamb": "It cannot be combined with ZeRO, and needs kernels of its own: give AdamW or Adam.",
    "zerooneadam": "It cannot be combined with ZeRO, and needs kernels of its own: give AdamW or Adam.",
    "lamb": _WHOLE,
    "fusedlamb": _WHOLE,
    "muon": _WHOLE,
    "adagrad": "DeepSpeed makes one group of all its parameters, so that biases would decay too: give AdamW.",
    "muadam": "Its package is not supported: give Adam.",
    "muadamw": "Its package is not supported: give AdamW.",
    "musgd": "Its package is not supported: give SGD.",
}
#: Schedule of DeepSpeed -> `lr_scheduler_type`; None where there is no equivalent.
SCHEDULES: Mapping[str, str | None] = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
    "OneCycle": None,
    "LRRangeTest": None,
}
#: Values of the argument `optim` that ZeRO may shard.
ELEMENTWISE = (*sorted({*OPTIMIZERS.values()}), "adamw_torch", "adam")
