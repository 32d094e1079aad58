"""Training arguments: inert, validated, without torch. The groups of fields are classes of `groups`."""

from trainer_lib.arguments.configs.accelerator_config import total_batch_size
from trainer_lib.arguments.enums import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SamplingStrategy,
    SaveStrategy,
    SchedulerType,
)
from trainer_lib.arguments.fields import arg
from trainer_lib.arguments.numeric import evaluation_fields, evaluation_matters, numeric_fields
from trainer_lib.arguments.parser import ArgumentParser, HfArgumentParser
from trainer_lib.arguments.training import Seq2SeqTrainingArguments, TFTrainingArguments, TrainingArguments

__all__ = [
    "ArgumentParser",
    "HfArgumentParser",
    "HubStrategy",
    "IntervalStrategy",
    "OptimizerNames",
    "ParallelMode",
    "SamplingStrategy",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainingArguments",
    "TFTrainingArguments",
    "TrainingArguments",
    "arg",
    "evaluation_fields",
    "evaluation_matters",
    "numeric_fields",
    "total_batch_size",
]
