"""What a spec names of the data, compared with what was prepared, before the training that comes before its use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_lib.base.suggestions import nearest, suggestion
from trainer_lib.errors import ConfigError
from trainer_lib.protocol.verb_results import PreparedSplit
from trainflow.flows.spec.checks import all_stages

if TYPE_CHECKING:
    from trainflow.flows.spec.spec import PipelineSpec


def check_splits(spec: PipelineSpec, prepared: Mapping[str, PreparedSplit]) -> None:
    """Check that every split which a later stage names was prepared, and the columns that it is measured by.

    Raises:
        ConfigError: a split or a column is missing.
    """
    named = [
        (f"{stage.section}.{setting}", split)
        for stage in all_stages()
        if stage.is_enabled(spec)
        for setting, splits in stage.splits(stage.config(spec)).items()
        for split in splits
    ]
    for field, split in named:
        if split in prepared:
            continue
        near = nearest(split, list(prepared))
        raise ConfigError(
            "The prepared data has no such split.",
            field=field,
            value=split,
            remedy=(f"Did you mean '{near}'? " if near else "") + f"Prepared were: {', '.join(prepared)}.",
        )
    for column in spec.evaluate.slices if spec.evaluate.enabled else ():
        for split in spec.evaluate.splits:
            if column not in prepared[split].columns:
                raise ConfigError(
                    f"The rows of the split '{split}' have no such column.",
                    field="evaluate.slices",
                    value=column,
                    remedy=suggestion(column, prepared[split].columns),
                )
