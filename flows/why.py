"""Why a stage would run: hit, or the exact fields that differ from its nearest earlier run. Nothing is run or written.

Neither mlflow nor torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.results import STAGES
from flows.spec.spec import PipelineSpec
from tasks.stage import keys as _keys
from tasks.stage import manifest as _manifests
from tasks.stage import sources as _sources
from tasks.stage.keys import Difference, StageKey
from tasks.stage.manifest import StageManifest

INPUTS = {
    "prepare-data": (),
    "train": ("prepare-data",),
    "evaluate": ("prepare-data", "train"),
    "predict": ("prepare-data", "train"),
    "push-to-hub": ("prepare-data", "train", "evaluate"),
}
"""Which stages feed which."""


@dataclass(frozen=True)
class StageReason:
    """What would happen to one stage, and why."""

    stage: str
    hit: bool
    reason: str
    key: str | None = None
    """None: not known before its inputs are."""
    nearest: str | None = None
    differences: tuple[Difference, ...] = ()
    manifest: StageManifest | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        changed = [vars(difference) for difference in self.differences]
        plain = {name: getattr(self, name) for name in ("stage", "hit", "reason", "key", "nearest")}
        return {**plain, "differences": changed}


def explain(spec: PipelineSpec) -> list[StageReason]:
    """For each stage that is switched on: is its result committed and intact, and if not, what differs?

    Raises:
        ConfigError: a source or the recipe cannot be read.
        StorageError: the storage cannot be read.
    """
    reasons: list[StageReason] = []
    manifests: dict[str, StageManifest] = {}
    for stage in STAGES:
        if not is_enabled(spec, stage):
            continue
        missing = [name for name in INPUTS[stage] if is_enabled(spec, name) and name not in manifests]
        if missing:
            reasons.append(
                StageReason(stage, False, f"{missing[0]} runs first; if its result is the same, this is kept")
            )
            continue
        reason = _explain_stage(spec, stage, manifests)
        reasons.append(reason)
        if reason.manifest is not None:
            manifests[stage] = reason.manifest
    return reasons


def is_enabled(spec: PipelineSpec, stage: str) -> bool:
    """Whether the spec has the stage switched on; prepare-data and train always are."""
    switches = {"evaluate": spec.evaluate.enabled, "predict": spec.predict.enabled, "push-to-hub": spec.publish.enabled}
    return switches.get(stage, True)


def key_of(spec: PipelineSpec, stage: str, manifests: Mapping[str, StageManifest]) -> StageKey:
    """The content key of a stage, given the manifests of the stages that feed it."""
    digests = {name: manifest.content_digest for name, manifest in manifests.items()}
    recipe, root = spec.recipe, spec.root
    if stage == "prepare-data":
        return _keys.prepare_key(spec.prepare, recipe, root, memory=_sources.memory(spec.storage))
    data = digests["prepare-data"]
    if stage == "train":
        return _keys.train_key(spec.train, recipe, root, data)
    if stage == "evaluate":
        return _keys.evaluate_key(spec.evaluate_config(), recipe, root, data, digests["train"])
    if stage == "predict":
        return _keys.predict_key(spec.predict_config(), recipe, root, data, digests["train"])
    from tasks.push_to_hub import publish_key  # brings Prefect along: a second that only this stage costs

    evaluation = manifests.get("evaluate") if spec.evaluate.enabled else None
    return publish_key(
        spec.publish, name=spec.name, data=manifests["prepare-data"], model=manifests["train"], evaluation=evaluation
    )


def pipeline_key(spec: PipelineSpec) -> str:
    """What a run of this spec is found again by: everything in it that is known before anything has run."""
    known = {stage: StageManifest(stage, "", "", "") for stage in INPUTS}
    stages = [stage for stage in STAGES if is_enabled(spec, stage)]
    fields = {stage: key_of(spec, stage, known).digest for stage in stages}
    return _keys.stage_key("pipeline", {"name": spec.name, **fields}).digest


def _explain_stage(spec: PipelineSpec, stage: str, manifests: Mapping[str, StageManifest]) -> StageReason:
    key = key_of(spec, stage, manifests)
    manifest, damage = _manifests.look_up(_manifests.stage_store(spec.storage, key))
    if manifest is not None:
        return StageReason(stage, True, f"committed {manifest.created}", key.digest, manifest=manifest)
    if damage is not None:
        return StageReason(stage, False, f"its result is damaged: {damage}", key.digest)
    miss = _manifests.explain_miss(spec.storage, key)
    return StageReason(stage, False, miss.reason, key.digest, miss.nearest, miss.differences)
