"""Facts of stages about their results, beyond files and metrics, for later stages and reports.

A stage of your own has facts too: a class of fields with JSON's types, derived with the stage's name ::

    @dataclass(frozen=True)
    class RowFacts(StageFacts, stage="count-rows"):
        rows: int

or, to replace one of the product's stages, derived from its facts: ``class MyData(PrepareFacts, stage="my-data")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from typing_extensions import override

from trainer_lib.base.records import from_record
from trainer_lib.protocol.requests import PreparedSplit, Trained


@dataclass(frozen=True)
class StageFacts:
    """Base of every stage's facts. A stage without a class of its own has exactly this."""

    # Filled by `__init_subclass__`, so a new stage changes nothing here.
    by_stage: ClassVar[dict[str, type[StageFacts]]] = {}
    """Stage name -> class of its facts: a committed file names its stage, and so the class it is read as."""

    def __init_subclass__(cls, *, stage: str | None = None, **options: Any) -> None:
        """Remember the class as that of `stage`."""
        super().__init_subclass__(**options)
        if stage is not None:
            StageFacts.by_stage[stage] = cls

    @staticmethod
    def of_stage(stage: str, record: Mapping[str, Any]) -> StageFacts:
        """The facts in a stage's commit file; what an older or newer version wrote besides is left out.

        Raises ConfigError if a fact is missing or has another type.
        """
        kind = StageFacts.by_stage.get(stage, StageFacts)
        known = {name: value for name, value in record.items() if value is not None}  # None is every optional default
        return from_record(kind, known, name=stage, ignore_unknown=True)

    def located(self, storage: str) -> StageFacts:
        """These facts as they are read from `storage`, which may have been moved or copied since."""
        return self


@dataclass(frozen=True)
class PrepareFacts(StageFacts, stage="prepare-data"):
    """The prepared splits by name, what the recipe notes about the data for its model, and warnings about the rows."""

    splits: dict[str, PreparedSplit]
    info: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainFacts(StageFacts, Trained, stage="train"):
    """Facts of a training: those that its worker reported, and the following."""

    model: dict[str, Any] = field(default_factory=dict)  # settings that the recipe's build_model was given
    # The run that has the training curve; None where the server had not given it an id.
    mlflow_run_id: str | None = None
    tracked_run: str | None = None  # the same run, by the name that it has before its server is reached
    # SHA-256 in hex of the recipe's code that measured while training; None: it measures nothing.
    metrics_code: str | None = None
    # Name of a committed checkpoint -> content digest of its files.
    checkpoint_digests: dict[str, str] = field(default_factory=dict)
    exported: str | None = None  # the checkpoint whose weights are those of the model; None: none is
    # Package -> version, and the processor, that it was trained with.
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateFacts(StageFacts, stage="evaluate"):
    """Facts of an evaluation."""

    # The probability with which an interval holds its metric; None: metrics have no intervals.
    confidence: float | None = None
    warnings: tuple[str, ...] = ()  # sentences about what may be wrong with the model


@dataclass(frozen=True)
class PredictFacts(StageFacts, stage="predict"):
    """The split that was predicted, and its number of rows."""

    rows: int
    split: str


@dataclass(frozen=True)
class PublishFacts(StageFacts, stage="push-to-hub"):
    """Facts of a publication."""

    target: str  # address of the hub's repository or folder
    published_url: str  # address of this publication
    revision: str  # commit of the publication on that hub
    published_digest: str  # content digest of the published files
    created: bool = True  # whether this made a new revision, or the hub held the content already
    below: str | None = None  # path of the publication below the storage; None: it lies elsewhere
    held: str | None = None  # why this model was not published and that publication stays; None: it has this model

    @override
    def located(self, storage: str) -> StageFacts:
        return self if self.below is None else replace(self, published_url=f"{storage}/{self.below}")
