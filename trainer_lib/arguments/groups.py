"""The groups of arguments as one flat dataclass, without behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.batch_arguments import BatchArguments
from trainer_lib.arguments.data_arguments import DataArguments
from trainer_lib.arguments.distributed_arguments import DistributedArguments
from trainer_lib.arguments.evaluation_arguments import EvaluationArguments
from trainer_lib.arguments.hub_arguments import HubArguments
from trainer_lib.arguments.logging_arguments import LoggingArguments
from trainer_lib.arguments.optimisation_arguments import OptimisationArguments
from trainer_lib.arguments.precision_arguments import PrecisionArguments
from trainer_lib.arguments.run_arguments import RunArguments
from trainer_lib.arguments.saving_arguments import SavingArguments


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
