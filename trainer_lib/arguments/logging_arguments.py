"""Arguments about what a training shows and records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from trainer_lib.arguments.enums import IntervalStrategy
from trainer_lib.arguments.fields import Accepts, Steps, Words, arg

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
    """How often, how much, and to which trackers a run reports."""

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
