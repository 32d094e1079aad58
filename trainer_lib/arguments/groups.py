"""The groups of arguments as one flat dataclass, without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trainer_lib.arguments.enums import HubStrategy, IntervalStrategy, SamplingStrategy, SaveStrategy
from trainer_lib.arguments.fields import Accepts, OptionalSteps, Settings, Steps, Unset, Words, arg
from trainer_lib.arguments.optimisation_arguments import OptimisationArguments

if TYPE_CHECKING:
    _Checkpoint = bool | str | None
else:
    _Checkpoint = Annotated[str | None, Accepts(bool | str | None)]


@dataclass
class RunArguments:
    """The output of a run, its name, its seeds, and the checkpoint it resumes from."""

    output_dir: str | None = arg(
        None,
        "Folder for checkpoints and the final model: a path, or any fsspec URL (s3://, gs://, memory://). "
        'Becomes "trainer_output" when not given.',
        affects="nothing",
    )
    overwrite_output_dir: bool = arg(
        False, "Start from scratch even if the output folder holds checkpoints of an earlier run.", affects="nothing"
    )
    run_name: str | None = arg(None, "Name of the run in the trackers.", affects="nothing")
    # The reference's default.
    project: str = arg(
        "huggingface", "Project (experiment) of the run in trackers that have projects.", affects="nothing"
    )
    do_train: bool = arg(
        False, "For your own script: whether to train. The Trainer does not read it.", affects="nothing"
    )
    do_eval: bool = arg(
        False,
        'For your own script: whether to evaluate. Becomes true when eval_strategy is not "no".',
        affects="nothing",
    )
    do_predict: bool = arg(
        False, "For your own script: whether to predict. The Trainer does not read it.", affects="nothing"
    )
    resume_from_checkpoint: _Checkpoint = arg(
        None,
        'Checkpoint to continue from: a URL; true = the newest in output_dir, an error if there is none; "auto" = the '
        "newest, or a new start.",
        affects="nothing",
    )
    # In both keys: weights that no file holds are drawn from it, for an evaluation as well.
    seed: int = arg(
        42,
        "Seed of every random number in the run, including the model's initial weights.",
        affects="outputs",
        unit="seed",
        ge=0,
    )
    data_seed: int | None = arg(
        None, "Seed of the data order; the run's seed when not given.", affects="weights", unit="seed", ge=0
    )
    full_determinism: bool = arg(
        False,
        "Use deterministic algorithms only; slower, and an error for an operation that has none.",
        affects="outputs",
    )
    debug: Words = arg(
        "",
        "Diagnostics, separated by spaces: underflow_overflow reports the first non-finite value by module; "
        "tpu_metrics_debug.",
        affects="nothing",
    )
    use_cpu: bool = arg(False, "Use the CPU even on a machine with an accelerator.", affects="nothing")


# Arguments about batch sizes and the length of training.
#
# Glossary
#     micro-batch   the samples that one process computes at a time (`per_device_train_batch_size`)
#     step          one optimizer step: `gradient_accumulation_steps` micro-batches on every process
#     global batch  all samples of one step: micro-batch x accumulation x processes


@dataclass
class BatchArguments:
    """Batch sizes and the length of training."""

    per_device_train_batch_size: int = arg(
        Unset(8),
        "Samples that one process trains on at a time (the micro-batch).",
        affects="weights",
        unit="samples",
        ge=1,
    )
    # Not in a key: metrics are weighted by samples, not by batches.
    per_device_eval_batch_size: int = arg(
        8, "Samples that one process evaluates at a time.", affects="nothing", unit="samples", ge=1
    )
    global_batch_size: int | None = arg(
        None,
        "Samples of one optimizer step over all processes. When given, gradient accumulation follows from it for any "
        "number of processes; given alone, a process takes its whole share at a time, halved where memory runs out.",
        affects="weights",
        unit="samples",
        ge=1,
        alone=True,
    )
    gradient_accumulation_steps: int = arg(
        1,
        "Micro-batches whose gradients are added up before an optimizer step.",
        affects="weights",
        unit="micro-batches",
        ge=1,
    )
    # Not in a key: the global batch, which the weights depend on, stays the same.
    auto_find_batch_size: bool = arg(
        False,
        "When memory runs out, halve the micro-batch and double the accumulation; the global batch stays the same.",
        affects="nothing",
    )
    average_tokens_across_devices: bool = arg(
        True,
        "Average the loss over the target tokens of all processes at once, instead of per process first.",
        affects="weights",
    )
    num_train_epochs: float = arg(
        3.0,
        "Passes over the training data; a fraction ends inside the last one.",
        affects="weights",
        unit="epochs",
        gt=0,
    )
    # -1 is the reference's way of writing "not given".
    max_steps: int = arg(
        -1,
        "Optimizer steps in all; when positive it overrides num_train_epochs.",
        affects="weights",
        unit="steps",
        ge=-1,
    )
    past_index: int = arg(
        -1,
        "Position of a recurrent memory in the model's outputs, which the next batch gets as `mems`; -1 = none.",
        affects="outputs",
        unit="position",
        ge=-1,
    )


if TYPE_CHECKING:
    _Float8 = Any  # a name, a truth value, or accelerate's AORecipeKwargs
else:
    _Float8 = Annotated[str | None, Accepts(str | bool | None)]


@dataclass
class PrecisionArguments:
    """Number formats, memory savings, compilation, kernels."""

    # In both keys: an evaluation computes in this format, too.
    bf16: bool = arg(False, "Compute in bfloat16 where that is safe (mixed precision).", affects="outputs")
    fp16: bool = arg(
        False, "Compute in float16 where that is safe, with loss scaling (mixed precision).", affects="outputs"
    )
    bf16_full_eval: bool = arg(False, "Evaluate with the weights cast to bfloat16.", affects="evaluation")
    fp16_full_eval: bool = arg(False, "Evaluate with the weights cast to float16.", affects="evaluation")
    tf32: bool | None = arg(
        None,
        "Allow TensorFloat-32 in matrix products on NVIDIA GPUs; torch's own setting when not given.",
        affects="outputs",
    )
    # Ours: in the reference it is a setting of accelerate.
    fp8: _Float8 = arg(
        None,
        "Multiply in float8 in linear layers, by torchao and with bf16: tensorwise or rowwise scales.",
        affects="outputs",
        bare=True,
        alone=True,
    )
    # Not in a key: recomputed activations have the same values.
    gradient_checkpointing: bool | None = arg(
        None,
        "Recompute activations in the backward pass instead of keeping them; this saves memory and costs time.",
        affects="nothing",
        bare=True,
    )
    gradient_checkpointing_kwargs: Settings = arg(
        None, 'Settings of gradient_checkpointing, such as {"every": 2} or {"save": ["mm"]}.', affects="nothing"
    )
    # The newer name of the two; `validation` keeps them equal.
    activation_checkpointing: bool | None = arg(
        None, "Another name of gradient_checkpointing.", affects="nothing", bare=True
    )
    activation_checkpointing_kwargs: Settings = arg(
        None, "Another name of gradient_checkpointing_kwargs.", affects="nothing"
    )
    torch_compile: bool = arg(False, "Compile the model with torch.compile.", affects="outputs")
    torch_compile_backend: str | None = arg(
        None, "Backend of torch.compile; giving one turns torch_compile on.", affects="outputs"
    )
    torch_compile_mode: str | None = arg(
        None, "Mode of torch.compile; giving one turns torch_compile on.", affects="outputs"
    )
    use_liger_kernel: bool = arg(
        False, "Replace layers by those of the Liger kernels (needs liger-kernel and a GPU).", affects="outputs"
    )
    liger_kernel_config: dict[str, bool] | None = arg(None, "The Liger kernels to apply, by name.", affects="outputs")
    torch_empty_cache_steps: int | None = arg(
        None,
        "Steps between calls that release unused device memory; no calls when not given.",
        affects="nothing",
        unit="steps",
        ge=1,
    )
    skip_memory_metrics: bool = arg(
        True, "Leave memory use out of the metrics; measuring it costs time.", affects="nothing"
    )
    use_cache: bool = arg(
        False,
        "Let the model keep keys and values during training, which only wastes memory in most cases.",
        affects="nothing",
    )

    @property
    def mixed_precision(self) -> str:
        """The number format of mixed precision: `"bf16"`, `"fp16"` or `"no"`."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"


@dataclass
class DataArguments:
    """Data loading, column selection, sampling order."""

    dataloader_drop_last: bool = arg(False, "Drop the last batch if it is not full.", affects="weights")
    # Not in a key: the order is a function of the seed, whichever process loads a sample.
    dataloader_num_workers: int = arg(
        0, "Processes that load data; 0 = the training process loads it.", affects="nothing", unit="processes", ge=0
    )
    dataloader_pin_memory: bool = arg(True, "Load into memory that copies to an accelerator faster.", affects="nothing")
    dataloader_persistent_workers: bool = arg(False, "Keep the loading processes between epochs.", affects="nothing")
    dataloader_prefetch_factor: int | None = arg(
        None, "Batches that each loading process prepares in advance.", affects="nothing", unit="batches", ge=1
    )
    dataloader_multiprocessing_context: str | None = arg(
        None, "How loading processes start.", affects="nothing", choices=("fork", "spawn", "forkserver")
    )
    # In the train key: without order, batches come as workers finish, which no resume can repeat.
    dataloader_in_order: bool = arg(
        True, "Yield batches in order, even when a later one is ready first.", affects="weights"
    )
    remove_unused_columns: bool = arg(True, "Drop columns that the model's forward does not accept.", affects="outputs")
    label_names: list[str] | None = arg(
        None, "Columns that hold labels; taken from the model's signature when not given.", affects="outputs"
    )
    train_sampling_strategy: SamplingStrategy | str = arg(
        "random", "Order of the training samples; group_by_length saves padding.", affects="weights"
    )
    length_column_name: str = arg(
        "length", "Column that holds precomputed lengths, for group_by_length.", affects="outputs"
    )


@dataclass
class EvaluationArguments:
    """When to evaluate, what to keep, and which model is the best."""

    eval_strategy: IntervalStrategy | str = arg("no", "When to evaluate during training.", affects="selection")
    eval_steps: OptionalSteps = arg(
        None,
        "Steps between two evaluations; a number below 1 is a share of all steps; logging_steps when not given.",
        affects="selection",
        unit="steps, or a share",
        ge=0,
    )
    eval_delay: Steps = arg(
        0,
        "Steps or epochs (as eval_strategy says) before the first evaluation.",
        affects="selection",
        unit="steps or epochs",
        ge=0,
    )
    eval_on_start: bool = arg(False, "Evaluate once before the first step.", affects="selection")
    prediction_loss_only: bool = arg(False, "Keep only the loss: no predictions, no metrics.", affects="evaluation")
    # Not in a key: the outputs are the same wherever they wait.
    eval_accumulation_steps: int | None = arg(
        None,
        "Micro-batches whose outputs stay on the device before they go to disk.",
        affects="nothing",
        unit="micro-batches",
        ge=1,
    )
    batch_eval_metrics: bool = arg(
        False,
        "Call compute_metrics for every batch (with compute_result=True for the last) instead of once for all data.",
        affects="evaluation",
    )
    include_for_metrics: list[str] = arg(
        factory=list,
        help='Further values for compute_metrics: "inputs", "loss".',
        affects="evaluation",
        choices=("inputs", "loss"),
    )
    eval_do_concat_batches: bool = arg(
        True, "Give compute_metrics one array; false = a list of the batches' arrays.", affects="evaluation"
    )
    eval_use_gather_object: bool = arg(
        False, "Gather outputs that are not tensors from all processes.", affects="evaluation"
    )
    metric_for_best_model: str | None = arg(
        None,
        'Metric that decides which checkpoint is the best; "loss" if one is needed and none is given.',
        affects="selection",
    )
    greater_is_better: bool | None = arg(
        None, 'A larger metric is better; when not given, true unless the name ends in "loss".', affects="selection"
    )
    # In the train key by itself: it decides which weights the run ends with.
    load_best_model_at_end: bool = arg(
        False, "End with the weights of the best checkpoint instead of the last ones.", affects="weights"
    )
    use_legacy_prediction_loop: bool = arg(
        False,
        "Evaluate by prediction_loop, which older subclasses override, instead of evaluation_loop.",
        affects="nothing",
    )


# The reference's names; `detail` and `passive` exist only there.
LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


if TYPE_CHECKING:
    _Counting = str | bool
    _Space = str | Literal[False] | None
else:
    _Counting = Annotated[str, Accepts(str | bool)]
    _Space = Annotated[str | None, Accepts(str | Literal[False] | None)]


@dataclass
class LoggingArguments:
    """Arguments of reporting: how often, how much, and to which trackers."""

    logging_strategy: IntervalStrategy | str = arg("steps", "When metrics are logged.", affects="nothing")
    logging_steps: Steps = arg(
        500,
        "Steps between two logs; a number below 1 is a share of all steps.",
        affects="nothing",
        unit="steps, or a share",
        ge=0,
    )
    logging_first_step: bool = arg(False, "Log the first step too.", affects="nothing")
    logging_nan_inf_filter: bool = arg(
        True,
        "Leave non-finite losses out of the displayed mean. They are counted and logged, and cause no optimizer step.",
        affects="nothing",
    )
    include_num_input_tokens_seen: _Counting = arg(
        "no",
        'Count the input tokens seen: "all", "non_padding", or "no".',
        affects="nothing",
        choices=("all", "non_padding", "no"),
    )
    include_tokens_per_second: bool = arg(False, "Log tokens per second and device.", affects="nothing")
    log_level: str = arg(
        "passive", "Level of the main process's log; passive = info.", affects="nothing", choices=LOG_LEVELS
    )
    log_level_replica: str = arg(
        "warning", "Level of the other processes' log; passive = warning.", affects="nothing", choices=LOG_LEVELS
    )
    log_on_each_node: bool = arg(
        True, "Write one main log per machine, instead of one for the whole job.", affects="nothing"
    )
    disable_tqdm: bool | None = arg(
        None, "Show no progress bar. When not given, a terminal shows a bar and a file plain lines.", affects="nothing"
    )
    # "none" is the reference's default since its version 5; before, it was "all".
    report_to: Words = arg(
        "none",
        'Trackers to report to: "jsonl", "mlflow", …, "all" = every installed one, or "none".',
        affects="nothing",
    )
    logging_dir: str | None = arg(
        None, "Folder for trackers that write files; output_dir/runs when not given.", affects="nothing"
    )
    trackio_space_id: str | None = arg(None, "Space that Trackio reports to.", affects="nothing")
    trackio_bucket_id: str | None = arg(None, "Bucket that Trackio stores in.", affects="nothing")
    trackio_static_space_id: _Space = arg(
        None, "Static space that Trackio publishes to at the end; false = none.", affects="nothing"
    )


@dataclass
class SavingArguments:
    """When checkpoints are written, what they hold, and what a resume restores."""

    # "selection": a save decides nothing by itself, but with `best` it follows the evaluations.
    save_strategy: SaveStrategy | str = arg("steps", "When a checkpoint is written.", affects="selection")
    save_steps: Steps = arg(
        500,
        "Steps between two checkpoints; a number below 1 is a share of all steps.",
        affects="selection",
        unit="steps, or a share",
        ge=0,
    )
    save_total_limit: int | None = arg(
        None,
        "Checkpoints to keep; rotation never removes the best and the newest intact one. When not given, all are kept.",
        affects="nothing",
        unit="checkpoints",
        ge=1,
    )
    save_only_model: bool = arg(
        False,
        "Save only the model, without optimizer, schedule and random states: smaller, but training cannot resume.",
        affects="nothing",
    )
    save_async: bool = arg(
        False,
        "Block training only while the state is copied to host memory; write and commit it in the background.",
        affects="nothing",
        alone=True,
    )
    # Ours: in the reference the first failed save ends the run.
    max_failed_saves: int = arg(
        1,
        "The run fails after so many failed saves in a row, because no space is left or the store cannot be reached.",
        affects="nothing",
        unit="saves",
        ge=1,
        alone=True,
    )
    save_on_each_node: bool = arg(
        False, "Write the checkpoint once per machine, for machines without a shared disk.", affects="nothing"
    )
    restore_callback_states_from_checkpoint: bool = arg(
        False, "On resume, restore the callbacks' states too, in place of those given.", affects="weights"
    )
    enable_jit_checkpoint: bool = arg(
        True, "On SIGTERM, write a checkpoint after the current step, then stop.", affects="nothing"
    )
    allow_global_batch_change: bool = arg(
        False,
        "On resume, accept another global batch: no sample is lost, up to one batch of samples is repeated, and the "
        "schedule ends at another step.",
        affects="nothing",
        alone=True,
    )
    ignore_data_skip: bool = arg(
        False, "On resume, start at the beginning of the data instead of after the last sample.", affects="weights"
    )


@dataclass
class HubArguments:
    """Arguments of pushes to the hub."""

    push_to_hub: bool = arg(False, "Push the model to the hub while training and at the end.", affects="nothing")
    hub_model_id: str | None = arg(
        None,
        'Repository: "name", "owner/name", or a folder\'s fsspec URL; the name of output_dir when not given.',
        affects="nothing",
    )
    hub_strategy: HubStrategy | str = arg(
        "every_save",
        "What is pushed: end = the model, once; every_save = the model at every save; checkpoint = also the newest "
        "checkpoint, as last-checkpoint/; all_checkpoints = also every checkpoint.",
        affects="nothing",
    )
    # `to_dict` writes <HUB_TOKEN> in its place, and reading that back gives None.
    hub_token: str | None = arg(
        None, "Access token; that of the login when not given. Never written anywhere.", affects="nothing", secret=True
    )
    hub_private_repo: bool | None = arg(
        None, "Create the repository private; the owner's default when not given.", affects="nothing"
    )
    hub_always_push: bool = arg(
        False, "Push even while an earlier push is under way; otherwise that save is not pushed.", affects="nothing"
    )
    hub_revision: str | None = arg(
        None, "Branch, tag or commit to push to; the main branch when not given.", affects="nothing"
    )


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
    parallelism: dict[str, Any] | None = arg(
        None,
        "Processes in each dimension (replicate, shard, tensor), and the plan of the layers that tensor divides.",
        affects="nothing",
        alone=True,
    )
    parallelism_config: Any = arg(
        None, "The same as accelerate's ParallelismConfig or transformers' DistributedConfig.", affects="nothing"
    )
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


@dataclass
class Seq2SeqArguments:
    """The arguments that `Seq2SeqTrainer` adds."""

    sortish_sampler: bool = arg(
        False, "Sort samples by length with a little randomness, to save padding.", affects="weights"
    )
    predict_with_generate: bool = arg(
        False, "Evaluate on generated sequences instead of on logits.", affects="evaluation"
    )
    generation_max_length: int | None = arg(
        None,
        "Longest generated sequence; the model's own setting when not given.",
        affects="evaluation",
        unit="tokens",
        ge=1,
    )
    generation_num_beams: int | None = arg(
        None,
        "Beams of the beam search; the model's own setting when not given.",
        affects="evaluation",
        unit="beams",
        ge=1,
    )
    generation_config: Any = arg(
        None, "Generation settings: a GenerationConfig, or the name or folder to load one from.", affects="evaluation"
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
