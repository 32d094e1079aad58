"""Arguments about the run as a whole: its output, its name, its seeds, and the checkpoint it resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from trainer_lib.arguments.fields import Accepts, Words, arg

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
