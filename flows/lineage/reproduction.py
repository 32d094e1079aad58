"""`trainflow reproduce`: a recorded run, once more from its spec, sources and versions, and what came out compared.

The second run has a storage of its own; MLflow, the registry and hubs are left alone. On a CPU the weights and the
predictions must have the same bytes. A device that adds up in another order at every run gives other bytes; there the
metrics are compared, with a tolerance that the outcome states.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainer_lib.errors import ConfigError, NotReproducibleError
from trainer_lib.storage import Store
from trainflow.flows.lineage.lineage_chain import Chain
from trainflow.flows.records.past_runs import PastRun, find_run
from trainflow.flows.records.recorded_spec import read_kept_spec
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult, flat_metrics
from trainflow.flows.runs.run_details import RunComparison, compare_runs, read_details
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.configs import RegisterConfig
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.manifest import StageManifest, look_up_under

TOLERANCE = 1e-3
"""The largest relative difference of metrics from a device that is not a CPU, unless another is given."""
_COMPARED = ("train", "evaluate", "predict")
_FOLDERS = {"train": "model/", "predict": "predictions/"}
"""Stage -> its folder of files that are compared."""
_FILES = (".safetensors", ".parquet")
_CPU = "CPU"
_MARK = "reproduces"  # a file of the second run's storage: the id of the first run

Verdict = Literal["same bytes", "same metrics", "different"]
RunPipeline = Callable[..., PipelineResult]


@dataclass
class Outcome:
    """The outcome of a reproduction."""

    run: str
    to: str
    comparison: RunComparison
    tolerance: float | None  # the largest relative difference of metrics; None: bytes are compared
    files: list[dict[str, Any]]  # paths with the digests of both runs
    differences: list[str]  # sentences about results that differ
    has_equal_metrics: bool = True  # they are equal, not only within the tolerance

    @property
    def verdict(self) -> Verdict:
        """The verdict on the second run."""
        if self.differences:
            return "different"
        are_equal = self.has_equal_metrics and all(file["then"] == file["now"] for file in self.files)
        return "same bytes" if are_equal else "same metrics"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**vars(self), "verdict": self.verdict, "comparison": self.comparison.to_dict()}

    def failure(self) -> NotReproducibleError | None:
        """The failure that names the first difference; None: there is none."""
        if not self.differences:
            return None
        more = f" {len(self.differences) - 1} more differ." if len(self.differences) > 1 else ""
        what = f"The second run differs from the recorded one: {self.differences[0]}.{more}"
        remedy = "Use the versions and the kind of processor of the run; --tolerance compares metrics instead."
        return NotReproducibleError(what, field=self.run, value=self.to, remedy=remedy)


class Reproduction:
    """One run, reproduced. Raises ConfigError if it cannot be repeated from here.

    Args:
        to: storage of the second run, empty.
        tolerance: compare metrics with this relative difference; None: bytes on a CPU, `TOLERANCE` elsewhere.
    """

    def __init__(self, chain: Chain, to: str, tolerance: float | None, say: Callable[[str], object]) -> None:
        if chain.run is None or chain.storage is None:
            what = "The run is not known here: its spec and its recipe are on its storage."
            raise ConfigError(what, field="X", value=chain.address, remedy="Name the storage: --storage URL.")
        self.run: PastRun = chain.run
        self._to, self._given = to, tolerance
        self._storage = chain.storage.url
        if "train" not in self.run.stages:
            what = "This run has trained no model that could be compared."
            raise ConfigError(what, field="X", value=self.run.id, remedy="Name a run that has finished.")
        if self.run.from_run is not None:
            what = f"This run took results from the run {self.run.from_run}, whose recipe may have been another."
            remedy = f"Reproduce that run: trainflow reproduce {self.run.from_run}."
            raise ConfigError(what, field="X", value=self.run.id, remedy=remedy)
        self._then = {stage: self._recorded(stage) for stage in _COMPARED if stage in self.run.stages}
        self._prepared = chain.lineage.stage("prepare-data")
        spec = read_kept_spec(self._storage, self.run, say)
        self.spec = _quiet(mixed_alike(spec, chain.lineage.arguments.get("mixture", ())), to)
        self.spec.check()

    def carry_out(self, run_pipeline: RunPipeline) -> Outcome:
        """Run it again, as `trainflow.flows.pipeline.run_pipeline` does, and compare. Raises TrainflowError."""
        prepared = run_pipeline(self.spec, only="prepare-data")
        prepared.raise_for_error()
        then, now = self._prepared, prepared.manifests()["prepare-data"].content_digest
        if then is not None and now != then.content_digest:
            digests = f"{now[:12]}…, that of the run {str(then.content_digest)[:12]}…"
            what = f"The data differs: the prepared data has the digest {digests}."
            raise NotReproducibleError(what, field="data", remedy="Restore the data.")
        result = run_pipeline(self.spec)
        result.raise_for_error()
        again = find_run(self._to, result.pipeline_key[:RUN_ID_CHARS], field="--to")
        comparison = compare_runs(read_details(self._storage, self.run), read_details(self._to, again))
        # The spec is the recorded one, but for what others would see.
        return self._judge(result.manifests(), replace(comparison, spec=[]))

    def _recorded(self, stage: str) -> StageManifest:
        manifest, damage = look_up_under(self._storage, stage, self.run.stages[stage])
        if manifest is None:
            what = f"The result of {stage} in the run {f'is damaged: {damage}' if damage else 'is gone'}."
            remedy = "trainflow verify shows what of the run is left."
            raise ConfigError(what, field="X", value=self.run.id, remedy=remedy)
        return manifest

    def _judge(self, now: Mapping[str, StageManifest], comparison: RunComparison) -> Outcome:
        then, tolerance = {stage: old for stage, old in self._then.items() if stage in now}, self._given
        trained = [side["train"].facts for side in (then, now)]
        devices = {facts.device or _CPU for facts in trained if isinstance(facts, TrainFacts)}
        if tolerance is None and devices - {_CPU}:
            tolerance = TOLERANCE
        files = [file for stage in _FOLDERS if stage in then for file in _compare_files(then[stage], now[stage])]
        differences = []
        for file in files:
            if not (file["then"] and file["now"]):
                differences.append(f"{file['path']} is in one of them only")
            elif file["then"] != file["now"] and (tolerance is None or "evaluate" not in then):
                differences.append(f"{file['path']} has other bytes")
        old, new = (flat_metrics(side["evaluate"].metrics) if "evaluate" in side else {} for side in (then, now))
        pairs = {name: (old[name], new[name]) for name in sorted(old.keys() & new.keys())}
        unequal = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and not all(map(math.isnan, pair))}
        for name, pair in unequal.items():
            if not math.isclose(*pair, rel_tol=tolerance or 0.0):
                differences.append(f"{name}: {old[name]:.6g} in the run, {new[name]:.6g} here")
        return Outcome(self.run.id, self._to, comparison, tolerance, files, differences, not unequal)


@contextlib.contextmanager
def open_scratch(to: str | None, run: str) -> Iterator[str]:
    """The storage of a second run: a temporary folder, or `to`. Raises ConfigError if that holds anything else."""
    if to is None:
        with tempfile.TemporaryDirectory(prefix="trainflow-reproduction-", ignore_cleanup_errors=True) as folder:
            yield folder
        return
    store = Store.open(to, field="--to")
    left = store.read_if_exists(_MARK, limit=100)
    if store.children() and left != run.encode():
        raise ConfigError("The folder is not empty.", field="--to", value=to, remedy="Name a new folder.")
    store.ensure_writable(field="--to")
    store.write_bytes(_MARK, run.encode())
    yield store.url


def mixed_alike(spec: PipelineSpec, changes: Sequence[Mapping[str, Any]]) -> PipelineSpec:
    """The spec whose schedule has the weights that were changed while the run trained."""
    mixture = spec.prepare.mixture
    if mixture is None or not changes:
        return spec
    schedule = {**mixture.schedule, **{int(change["step"]): dict(change["weights"]) for change in changes}}
    mixed = mixture.model_copy(update={"schedule": schedule})
    return spec.model_copy(update={"prepare": spec.prepare.model_copy(update={"mixture": mixed})})


def _quiet(spec: PipelineSpec, to: str) -> PipelineSpec:
    """The spec on a storage of its own, and without anything that others would see."""
    args = {**spec.train.args, "report_to": "none", "push_to_hub": False}
    changed = {
        "storage": to,
        "refresh": {},
        "train": spec.train.model_copy(update={"args": args}),
        "evaluate": spec.evaluate.model_copy(update={"require": {}}),
        "publish": spec.publish.model_copy(update={"enabled": False}),
        "register": RegisterConfig(resamples=spec.register.resamples, metric=spec.register.metric),
        "tracking": spec.tracking.model_copy(update={"enabled": False}),
    }
    return spec.model_copy(update=changed).with_resolver(spec.resolver)


def _compare_files(old: StageManifest, new: StageManifest) -> Iterator[dict[str, Any]]:
    below = _FOLDERS[old.stage]
    sides = [
        {file.path: file for file in side.files if file.path.startswith(below) and file.path.endswith(_FILES)}
        for side in (old, new)
    ]
    for path in sorted(sides[0].keys() | sides[1].keys()):
        then, now = (side[path].sha256 if path in side else None for side in sides)
        yield {"stage": old.stage, "path": path, "then": then, "now": now, "folders": [old.url, new.url]}
