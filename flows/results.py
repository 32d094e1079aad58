"""What a pipeline run tells: one outcome per stage, and where the run can be looked at. No engine is imported here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainer_lib.errors import TrainflowError

Status = Literal["cached", "ran", "failed", "skipped"]

STAGES = ("prepare-data", "train", "evaluate", "predict", "push-to-hub")
_SHORT = {"prepare": "prepare-data", "publish": "push-to-hub"}


def stage_name(name: str) -> str | None:
    """The stage meant by `name` (`prepare` and `publish`, as the spec calls them, are understood); None if unknown."""
    name = _SHORT.get(name, name)
    return name if name in STAGES else None


@dataclass(frozen=True)
class StageOutcome:
    """How one stage ended, and why it ran or did not."""

    stage: str
    status: Status
    reason: str
    seconds: float = 0.0
    manifest: dict[str, Any] | None = None


@dataclass
class PipelineResult:
    """A pipeline run. A typed failure is held in `error` (`raise_for_error` raises it), never lost."""

    name: str
    pipeline_key: str
    storage: str
    stages: list[StageOutcome] = field(default_factory=list)
    seconds: float = 0.0
    mlflow_run_id: str | None = None
    tracking_uri: str | None = None
    run_url: str | None = None
    report_url: str | None = None
    error: TrainflowError | None = None

    @property
    def ok(self) -> bool:
        """Whether no stage failed."""
        return self.error is None

    def outcome(self, stage: str) -> StageOutcome | None:
        """The outcome of `stage`, or None if the run never came to it."""
        return next((outcome for outcome in self.stages if outcome.stage == stage), None)

    def raise_for_error(self) -> None:
        """Raises the failure that ended the run, if one did."""
        if self.error is not None:
            raise self.error

    def to_dict(self) -> dict[str, Any]:
        """This result as plain JSON; the error as its record."""
        plain = {name: value for name, value in vars(self).items() if name not in ("stages", "error")}
        error = None if self.error is None else self.error.to_record()
        return {**plain, "stages": [asdict(outcome) for outcome in self.stages], "error": error}
