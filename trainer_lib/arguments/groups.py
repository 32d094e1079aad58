"""All groups of arguments as one flat dataclass, without behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.batch import BatchArguments
from trainer_lib.arguments.data import DataArguments
from trainer_lib.arguments.distributed import DistributedArguments
from trainer_lib.arguments.evaluation import EvaluationArguments
from trainer_lib.arguments.hub import HubArguments
from trainer_lib.arguments.logging import LoggingArguments
from trainer_lib.arguments.optimisation import OptimisationArguments
from trainer_lib.arguments.precision import PrecisionArguments
from trainer_lib.arguments.run import RunArguments
from trainer_lib.arguments.saving import SavingArguments


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
