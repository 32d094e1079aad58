"""The groups of arguments as one flat dataclass, without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trainer_lib.arguments.enums import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SamplingStrategy,
    SaveStrategy,
    SchedulerType,
)
from trainer_lib.arguments.fields import (
    Accepts,
    OptionalSteps,
    Settings,
    Steps,
    Unset,
    Words,
    evaluation,
    nothing,
    outputs,
    selection,
    weights,
)

# The types of fields that take several; see `Accepts`.
if TYPE_CHECKING:
    _Checkpoint = bool | str | None
    _Float8 = Any  # a name, a truth value, or accelerate's AORecipeKwargs
    _Counting = str | bool
    _Space = str | Literal[False] | None
    _Sharding = str | bool | list[str] | None
else:
    _Checkpoint = Annotated[str | None, Accepts(bool | str | None)]
    _Float8 = Annotated[str | None, Accepts(str | bool | None)]
    _Counting = Annotated[str, Accepts(str | bool)]
    _Space = Annotated[str | None, Accepts(str | Literal[False] | None)]
    _Sharding = Annotated[str | None, Accepts(str | bool | list[str] | None)]


@dataclass
class RunArguments:
    """The output of a run, its name, its seeds, and the checkpoint it resumes from."""

    output_dir: str | None = nothing(
        None,
        "Folder for checkpoints and the final model: a path, or any fsspec URL (s3://, gs://, memory://). "
        'Becomes "trainer_output" when not given.',
    )
    overwrite_output_dir: bool = nothing(
        False, "Start from scratch even if the output folder holds checkpoints of an earlier run."
    )
    run_name: str | None = nothing(None, "Name of the run in the trackers.")
    # The reference's default.
    project: str = nothing("huggingface", "Project of the run in Trackio.")
    do_train: bool = nothing(False, "For your own script: whether to train. The Trainer does not read it.")
    do_eval: bool = nothing(
        False, 'For your own script: whether to evaluate. Becomes true when eval_strategy is not "no".'
    )
    do_predict: bool = nothing(False, "For your own script: whether to predict. The Trainer does not read it.")
    resume_from_checkpoint: _Checkpoint = nothing(
        None,
        'Checkpoint to continue from: a URL; true = the newest in output_dir, an error if there is none; "auto" = the '
        "newest, or a new start.",
    )
    # In both keys: weights that no file holds are drawn from it, for an evaluation as well.
    seed: int = outputs(
        42, "Seed of every random number in the run, including the model's initial weights.", unit="seed", ge=0
    )
    data_seed: int | None = weights(None, "Seed of the data order; the run's seed when not given.", unit="seed", ge=0)
    full_determinism: bool = outputs(
        False, "Use deterministic algorithms only; slower, and an error for an operation that has none."
    )
    debug: Words = nothing(
        "",
        "Diagnostics, separated by spaces: underflow_overflow reports the first non-finite value by module; "
        "tpu_metrics_debug.",
    )
    use_cpu: bool = nothing(False, "Use the CPU even on a machine with an accelerator.")


# Arguments about batch sizes and the length of training.
#
# Glossary
#     micro-batch   the samples that one process computes at a time (`per_device_train_batch_size`)
#     step          one optimizer step: `gradient_accumulation_steps` micro-batches on every process
#     global batch  all samples of one step: micro-batch x accumulation x processes


@dataclass
class BatchArguments:
    """Batch sizes and the length of training."""

    per_device_train_batch_size: int = weights(
        Unset(8), "Samples that one process trains on at a time (the micro-batch).", unit="samples", ge=1
    )
    # Not in a key: metrics are weighted by samples, not by batches.
    per_device_eval_batch_size: int = nothing(8, "Samples that one process evaluates at a time.", unit="samples", ge=1)
    global_batch_size: int | None = weights(
        None,
        "Samples of one optimizer step over all processes. When given, gradient accumulation follows from it for any "
        "number of processes; given alone, a process takes its whole share at a time, halved where memory runs out.",
        unit="samples",
        ge=1,
        alone=True,
    )
    gradient_accumulation_steps: int = weights(
        1, "Micro-batches whose gradients are added up before an optimizer step.", unit="micro-batches", ge=1
    )
    # Not in a key: the global batch, which the weights depend on, stays the same.
    auto_find_batch_size: bool = nothing(
        False,
        "When memory runs out, halve the micro-batch and double the accumulation; the global batch stays the same.",
    )
    average_tokens_across_devices: bool = weights(
        True, "Average the loss over the target tokens of all processes at once, instead of per process first."
    )
    num_train_epochs: float = weights(
        3.0, "Passes over the training data; a fraction ends inside the last one.", unit="epochs", gt=0
    )
    # -1 is the reference's way of writing "not given".
    max_steps: int = weights(
        -1, "Optimizer steps in all; when positive it overrides num_train_epochs.", unit="steps", ge=-1
    )
    past_index: int = outputs(
        -1,
        "Position of a recurrent memory in the model's outputs, which the next batch gets as `mems`; -1 = none.",
        unit="position",
        ge=-1,
    )


@dataclass
class OptimisationArguments:
    """Arguments about the optimizer, its learning-rate schedule, clipping and regularisation."""

    # The defaults below are the reference's.
    learning_rate: float = weights(
        5e-5, "Learning rate at the end of the warm-up, from which the schedule starts.", unit="per step", ge=0
    )
    lr_scheduler_type: SchedulerType | str = weights("linear", "How the learning rate changes over training.")
    lr_scheduler_kwargs: Settings = weights(None, 'Further settings of the schedule, such as {"num_cycles": 2}.')
    warmup_steps: Steps = weights(
        0,
        "Steps over which the learning rate rises from 0; a number below 1 is a share of all steps.",
        unit="steps, or a share",
        ge=0,
    )
    optim: OptimizerNames | str = weights("adamw_torch_fused", "The optimizer.")
    optim_args: str | None = weights(None, 'Further settings of the optimizer, as "name=value,name=value".')
    optim_target_modules: Words = weights(
        None,
        'Modules whose matrices a low-rank optimizer (GaLore, APOLLO) projects: names, a pattern, or "all-linear".',
    )
    weight_decay: float = weights(
        0.0, "Decoupled weight decay of all parameters except biases and norm layers.", unit="per step", ge=0
    )
    adam_beta1: float = weights(0.9, "Decay of Adam's running mean of gradients.", unit="per step", ge=0, lt=1)
    adam_beta2: float = weights(
        0.999, "Decay of Adam's running mean of squared gradients.", unit="per step", ge=0, lt=1
    )
    adam_epsilon: float = weights(1e-8, "Added to Adam's denominator to avoid division by zero.", unit="gradient", ge=0)
    max_grad_norm: float = weights(
        1.0, "Gradients with a larger norm are scaled down to it; 0 = never.", unit="L2 norm", ge=0
    )
    # Ours: the reference has no such limit.
    max_nonfinite_steps: int = nothing(
        10,
        "The run fails after so many steps in a row with a NaN or infinite loss or gradient; such steps are skipped.",
        unit="steps",
        ge=1,
        alone=True,
    )
    # Ours, too. The window is in the train key only when a spike rolls back (`numeric`).
    loss_spike_sigma: float | None = weights(
        None,
        "Roll back when a step's loss exceeds the mean of loss_spike_window steps by so many standard deviations, or "
        "when max_nonfinite_steps in a row are not finite: training goes back to the checkpoint before and skips the "
        "samples in between. When not given, never.",
        unit="standard deviations",
        gt=0,
        alone=True,
    )
    loss_spike_window: int = nothing(
        128, "Steps whose losses loss_spike_sigma compares with.", unit="steps", ge=2, alone=True
    )
    max_loss_spikes: int = nothing(
        3, "Rollbacks of one training, after which the next spike ends it.", unit="rollbacks", ge=0, alone=True
    )
    label_smoothing_factor: float = outputs(
        0.0,
        "Share of the target's probability that is distributed over all labels; 0 = none.",
        unit="probability",
        ge=0,
        lt=1,
    )
    # In the train key only: the noise is added in training mode.
    neftune_noise_alpha: float | None = weights(
        None,
        "Strength of the noise that training adds to embeddings (NEFTune, arXiv:2310.05914).",
        unit="noise scale",
        ge=0,
    )


@dataclass
class PrecisionArguments:
    """Number formats, memory savings, compilation, kernels."""

    # In both keys: an evaluation computes in this format, too.
    bf16: bool = outputs(False, "Compute in bfloat16 where that is safe (mixed precision).")
    fp16: bool = outputs(False, "Compute in float16 where that is safe, with loss scaling (mixed precision).")
    bf16_full_eval: bool = evaluation(False, "Evaluate with the weights cast to bfloat16.")
    fp16_full_eval: bool = evaluation(False, "Evaluate with the weights cast to float16.")
    tf32: bool | None = outputs(
        None, "Allow TensorFloat-32 in matrix products on NVIDIA GPUs; torch's own setting when not given."
    )
    # Ours: in the reference it is a setting of accelerate.
    fp8: _Float8 = outputs(
        None,
        "Multiply in float8 in linear layers, by torchao and with bf16: tensorwise or rowwise scales.",
        bare=True,
        alone=True,
    )
    # Not in a key: recomputed activations have the same values.
    gradient_checkpointing: bool | None = nothing(
        None,
        "Recompute activations in the backward pass instead of keeping them; this saves memory and costs time.",
        bare=True,
    )
    gradient_checkpointing_kwargs: Settings = nothing(
        None, 'Settings of gradient_checkpointing, such as {"every": 2} or {"save": ["mm"]}.'
    )
    # The newer name of the two; `validation` keeps them equal.
    activation_checkpointing: bool | None = nothing(None, "Another name of gradient_checkpointing.", bare=True)
    activation_checkpointing_kwargs: Settings = nothing(None, "Another name of gradient_checkpointing_kwargs.")
    torch_compile: bool = outputs(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = outputs(None, "Backend of torch.compile; giving one turns torch_compile on.")
    torch_compile_mode: str | None = outputs(None, "Mode of torch.compile; giving one turns torch_compile on.")
    use_liger_kernel: bool = outputs(
        False, "Replace layers by those of the Liger kernels (needs liger-kernel and a GPU)."
    )
    liger_kernel_config: dict[str, bool] | None = outputs(None, "The Liger kernels to apply, by name.")
    torch_empty_cache_steps: int | None = nothing(
        None, "Steps between calls that release unused device memory; no calls when not given.", unit="steps", ge=1
    )
    skip_memory_metrics: bool = nothing(True, "Leave memory use out of the metrics; measuring it costs time.")
    use_cache: bool = nothing(
        False, "Let the model keep keys and values during training, which only wastes memory in most cases."
    )

    @property
    def mixed_precision(self) -> str:
        """The number format of mixed precision: `"bf16"`, `"fp16"` or `"no"`."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"


@dataclass
class DataArguments:
    """Data loading, column selection, sampling order."""

    dataloader_drop_last: bool = weights(False, "Drop the last batch if it is not full.")
    # Not in a key: the order is a function of the seed, whichever process loads a sample.
    dataloader_num_workers: int = nothing(
        0, "Processes that load data; 0 = the training process loads it.", unit="processes", ge=0
    )
    dataloader_pin_memory: bool = nothing(True, "Load into memory that copies to an accelerator faster.")
    dataloader_persistent_workers: bool = nothing(False, "Keep the loading processes between epochs.")
    dataloader_prefetch_factor: int | None = nothing(
        None, "Batches that each loading process prepares in advance.", unit="batches", ge=1
    )
    dataloader_multiprocessing_context: str | None = nothing(
        None, "How loading processes start.", choices=("fork", "spawn", "forkserver")
    )
    # In the train key: without order, batches come as workers finish, which no resume can repeat.
    dataloader_in_order: bool = weights(True, "Yield batches in order, even when a later one is ready first.")
    remove_unused_columns: bool = outputs(True, "Drop columns that the model's forward does not accept.")
    label_names: list[str] | None = outputs(
        None, "Columns that hold labels; taken from the model's signature when not given."
    )
    train_sampling_strategy: SamplingStrategy | str = weights(
        "random", "Order of the training samples; group_by_length saves padding."
    )
    length_column_name: str = outputs("length", "Column that holds precomputed lengths, for group_by_length.")


@dataclass
class EvaluationArguments:
    """When to evaluate, what to keep, and which model is the best."""

    eval_strategy: IntervalStrategy | str = selection("no", "When to evaluate during training.")
    eval_steps: OptionalSteps = selection(
        None,
        "Steps between two evaluations; a number below 1 is a share of all steps; logging_steps when not given.",
        unit="steps, or a share",
        ge=0,
    )
    eval_delay: Steps = selection(
        0, "Steps or epochs (as eval_strategy says) before the first evaluation.", unit="steps or epochs", ge=0
    )
    eval_on_start: bool = selection(False, "Evaluate once before the first step.")
    prediction_loss_only: bool = evaluation(False, "Keep only the loss: no predictions, no metrics.")
    # Not in a key: the outputs are the same wherever they wait.
    eval_accumulation_steps: int | None = nothing(
        None, "Micro-batches whose outputs stay on the device before they go to disk.", unit="micro-batches", ge=1
    )
    batch_eval_metrics: bool = evaluation(
        False,
        "Call compute_metrics for every batch (with compute_result=True for the last) instead of once for all data.",
    )
    include_for_metrics: list[str] = evaluation(
        factory=list, help='Further values for compute_metrics: "inputs", "loss".', choices=("inputs", "loss")
    )
    eval_do_concat_batches: bool = evaluation(
        True, "Give compute_metrics one array; false = a list of the batches' arrays."
    )
    eval_use_gather_object: bool = evaluation(False, "Gather outputs that are not tensors from all processes.")
    metric_for_best_model: str | None = selection(
        None, 'Metric that decides which checkpoint is the best; "loss" if one is needed and none is given.'
    )
    greater_is_better: bool | None = selection(
        None, 'A larger metric is better; when not given, true unless the name ends in "loss".'
    )
    # In the train key by itself: it decides which weights the run ends with.
    load_best_model_at_end: bool = weights(
        False, "End with the weights of the best checkpoint instead of the last ones."
    )
    use_legacy_prediction_loop: bool = nothing(
        False, "Evaluate by prediction_loop, which older subclasses override, instead of evaluation_loop."
    )


# The reference's names; `detail` and `passive` exist only there.
LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


@dataclass
class LoggingArguments:
    """Arguments of reporting: how often, how much, and to which trackers."""

    logging_strategy: IntervalStrategy | str = nothing("steps", "When metrics are logged.")
    logging_steps: Steps = nothing(
        500, "Steps between two logs; a number below 1 is a share of all steps.", unit="steps, or a share", ge=0
    )
    logging_first_step: bool = nothing(False, "Log the first step too.")
    logging_nan_inf_filter: bool = nothing(
        True,
        "Leave non-finite losses out of the displayed mean. They are counted and logged, and cause no optimizer step.",
    )
    include_num_input_tokens_seen: _Counting = nothing(
        "no", 'Count the input tokens seen: "all", "non_padding", or "no".', choices=("all", "non_padding", "no")
    )
    include_tokens_per_second: bool = nothing(False, "Log tokens per second and device.")
    log_level: str = nothing("passive", "Level of the main process's log; passive = info.", choices=LOG_LEVELS)
    log_level_replica: str = nothing(
        "warning", "Level of the other processes' log; passive = warning.", choices=LOG_LEVELS
    )
    log_on_each_node: bool = nothing(True, "Write one main log per machine, instead of one for the whole job.")
    disable_tqdm: bool | None = nothing(
        None, "Show no progress bar. When not given, a terminal shows a bar and a file plain lines."
    )
    # "none" is the reference's default since its version 5; before, it was "all".
    report_to: Words = nothing(
        "none", 'Trackers to report to: "jsonl", "mlflow", …, "all" = every installed one, or "none".'
    )
    logging_dir: str | None = nothing(None, "Folder for trackers that write files; output_dir/runs when not given.")
    trackio_space_id: str | None = nothing(None, "Space that Trackio reports to.")
    trackio_bucket_id: str | None = nothing(None, "Bucket that Trackio stores in.")
    trackio_static_space_id: _Space = nothing(None, "Static space that Trackio publishes to at the end; false = none.")


@dataclass
class SavingArguments:
    """When checkpoints are written, what they hold, and what a resume restores."""

    # "selection": a save decides nothing by itself, but with `best` it follows the evaluations.
    save_strategy: SaveStrategy | str = selection("steps", "When a checkpoint is written.")
    save_steps: Steps = selection(
        500, "Steps between two checkpoints; a number below 1 is a share of all steps.", unit="steps, or a share", ge=0
    )
    save_total_limit: int | None = nothing(
        None,
        "Checkpoints to keep; rotation never removes the best and the newest intact one. When not given, all are kept.",
        unit="checkpoints",
        ge=1,
    )
    save_only_model: bool = nothing(
        False,
        "Save only the model, without optimizer, schedule and random states: smaller, but training cannot resume.",
    )
    save_async: bool = nothing(
        False,
        "Block training only while the state is copied to host memory; write and commit it in the background.",
        alone=True,
    )
    # Ours: in the reference the first failed save ends the run.
    max_failed_saves: int = nothing(
        1,
        "The run fails after so many failed saves in a row, because no space is left or the store cannot be reached.",
        unit="saves",
        ge=1,
        alone=True,
    )
    save_on_each_node: bool = nothing(
        False, "Write the checkpoint once per machine, for machines without a shared disk."
    )
    restore_callback_states_from_checkpoint: bool = weights(
        False, "On resume, restore the callbacks' states too, in place of those given."
    )
    enable_jit_checkpoint: bool = nothing(True, "On SIGTERM, write a checkpoint after the current step, then stop.")
    allow_global_batch_change: bool = nothing(
        False,
        "On resume, accept another global batch: no sample is lost, up to one batch of samples is repeated, and the "
        "schedule ends at another step.",
        alone=True,
    )
    ignore_data_skip: bool = weights(
        False, "On resume, start at the beginning of the data instead of after the last sample."
    )


@dataclass
class HubArguments:
    """Arguments of pushes to the hub."""

    push_to_hub: bool = nothing(False, "Push the model to the hub while training and at the end.")
    hub_model_id: str | None = nothing(
        None, 'Repository: "name", "owner/name", or a folder\'s fsspec URL; the name of output_dir when not given.'
    )
    hub_strategy: HubStrategy | str = nothing(
        "every_save",
        "What is pushed: end = the model, once; every_save = the model at every save; checkpoint = also the newest "
        "checkpoint, as last-checkpoint/; all_checkpoints = also every checkpoint.",
    )
    # `to_dict` writes <HUB_TOKEN> in its place, and reading that back gives None.
    hub_token: str | None = nothing(
        None, "Access token; that of the login when not given. Never written anywhere.", secret=True
    )
    hub_private_repo: bool | None = nothing(None, "Create the repository private; the owner's default when not given.")
    hub_always_push: bool = nothing(
        False, "Push even while an earlier push is under way; otherwise that save is not pushed."
    )
    hub_revision: str | None = nothing(None, "Branch, tag or commit to push to; the main branch when not given.")


@dataclass
class DistributedArguments:
    """The strategy that shares the work among processes, and its settings."""

    # Not in a key: where a parameter lies does not decide what is computed.
    fsdp: _Sharding = nothing(
        "",
        "Shard the model over processes (FSDP): full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2 or "
        "no_shard, and optionally offload and auto_wrap, separated by spaces.",
        bare=True,
    )
    fsdp_config: dict[str, Any] | str | None = nothing(None, "Settings of FSDP: a mapping, or the name of a JSON file.")
    # In a key: it may choose optimizer, schedule and precision. `numeric` keeps these parts only.
    deepspeed: dict[str, Any] | str | None = outputs(
        None, "Configuration of DeepSpeed: a mapping, or a JSON file. Giving one selects DeepSpeed."
    )
    # In a key, but `numeric` reduces it to the one setting that changes the order of additions.
    accelerator_config: dict[str, Any] | str | None = weights(
        None,
        "Batch handling: split_batches, dispatch_batches, even_batches, use_seedable_sampler, non_blocking, "
        "gradient_accumulation_kwargs, use_configured_state; a mapping, or a JSON file.",
    )
    parallelism: dict[str, Any] | None = nothing(
        None,
        "Processes in each dimension (replicate, shard, tensor), and the plan of the layers that tensor divides.",
        alone=True,
    )
    parallelism_config: Any = nothing(
        None, "The same as accelerate's ParallelismConfig or transformers' DistributedConfig."
    )
    ddp_backend: str | None = nothing(
        None,
        "Communication library; follows from the device when not given.",
        choices=("nccl", "gloo", "mpi", "ccl", "xccl", "hccl", "cncl", "mccl"),
    )
    # Half an hour is the reference's default.
    ddp_timeout: int = nothing(1800, "How long a collective may take before the run fails.", unit="seconds", ge=1)
    ddp_find_unused_parameters: bool | None = nothing(
        None,
        "Look for parameters without a gradient at every step; when not given, on unless activations are recomputed.",
    )
    ddp_bucket_cap_mb: int | None = nothing(
        None, "Size of the buckets in which gradients are exchanged.", unit="MiB", ge=1
    )
    ddp_broadcast_buffers: bool | None = weights(
        None, "Copy buffers (batch-norm statistics) from the first process at every step."
    )
    ddp_static_graph: bool | None = nothing(None, "Promise that every step uses the same parameters, for speed.")
    local_rank: int = nothing(-1, "Accepted from older launchers; ranks come from the environment.", unit="rank", ge=-1)


@dataclass
class Seq2SeqArguments:
    """The arguments that `Seq2SeqTrainer` adds."""

    sortish_sampler: bool = weights(False, "Sort samples by length with a little randomness, to save padding.")
    predict_with_generate: bool = evaluation(False, "Evaluate on generated sequences instead of on logits.")
    generation_max_length: int | None = evaluation(
        None, "Longest generated sequence; the model's own setting when not given.", unit="tokens", ge=1
    )
    generation_num_beams: int | None = evaluation(
        None, "Beams of the beam search; the model's own setting when not given.", unit="beams", ge=1
    )
    generation_config: Any = evaluation(
        None, "Generation settings: a GenerationConfig, or the name or folder to load one from."
    )


@dataclass
class ArgumentGroups(  # a dataclass takes its bases' fields last base first: output_dir comes first of all
    DistributedArguments,
    DataArguments,
    HubArguments,
    SavingArguments,
    EvaluationArguments,
    LoggingArguments,
    PrecisionArguments,
    OptimisationArguments,
    BatchArguments,
    RunArguments,
):
    """Every field of every group."""
