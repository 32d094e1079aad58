"""Optimizers by name, learning-rate schedules by name, and which parameters decay."""

from trainer_lib.optim.lr_schedules import create_scheduler, get_scheduler
from trainer_lib.optim.optimizers import (
    build_optimizer,
    create_optimizer_cls_and_kwargs,
    get_decay_parameter_names,
    parameter_groups,
    parse_optim_args,
)

__all__ = [
    "build_optimizer",
    "create_optimizer_cls_and_kwargs",
    "create_scheduler",
    "get_decay_parameter_names",
    "get_scheduler",
    "parameter_groups",
    "parse_optim_args",
]
