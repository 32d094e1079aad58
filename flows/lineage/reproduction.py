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
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainer_lib.errors import ConfigError, NotReproducibleError
from trainer_lib.storage import Store
from trainflow.flows.lineage.lineage_chain import Chain
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import PastRun, describe_changes
from trainflow.flows.records.recorded_spec import read_kept_spec
from trainflow.flows.records.results import PipelineResult, flat_metrics
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.configs import RegisterConfig
from trainflow.tasks.keys.sources import find_absent, fingerprints
from trainflow.tasks.model.model_lineage import describe_environment
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.manifest import StageManifest, look_up_under

TOLERANCE = 1e-3
"""The largest relative difference of metrics from a device that is not a CPU, unless another is given."""
_COMPARED = {"train": "model/", "predict": "predictions/"}
"""Stage -> where its files lie that are compared."""
_FILES = (".safetensors", ".parquet")
_CPU = "CPU"
_MARK = "reproduces"  # a file of the second run's storage: the id of the first run

Verdict = Literal["same bytes", "same metrics", "different"]
RunPipeline = Callable[..., PipelineResult]


@dataclass
class Outcome:
    """The outcome of a reproduction.

    Attributes:
        versions: name -> version then and version now, of those that differ.
        settings: sentences about what else the keys of the stages have otherwise.
        compared: files with the digests of both runs.
        metrics: name -> number then and number now, of those that differ.
        differences: sentences about what differs.
    """

    run: str
    verdict: Verdict = "same bytes"
    tolerance: float | None = None
    device: str = _CPU
    to: str = ""
    versions: dict[str, tuple[str, str]] = field(default_factory=dict)
    settings: list[str] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    def failure(self) -> NotReproducibleError | None:
        """The failure that names the first difference; None: there is none."""
        if self.verdict != "different":
            return None
        more = f" {len(self.differences) - 1} more differ." if len(self.differences) > 1 else ""
        what = f"The second run differs from the recorded one: {self.differences[0]}.{more}"
        remedy = "Use the versions and the kind of processor of the run; --tolerance compares metrics instead."
        return NotReproducibleError(what, field=self.run, value=self.to, remedy=remedy)


class Reproduction:
    """One run, reproduced. Raises ConfigError if it cannot be repeated from here.

    Args:
        chain: leads to the run.
        to: storage of the second run, empty.
        tolerance: compare metrics with this relative difference; None: bytes on a CPU, `TOLERANCE` elsewhere.
        say: called with a line at every step.
    """

    def __init__(self, chain: Chain, to: str, tolerance: float | None, say: Callable[[str], object]) -> None:
        if chain.run is None or chain.storage is None:
            what = "The run is not known here: its spec and its recipe are on its storage."
            raise ConfigError(what, field="X", value=chain.address, remedy="Name the storage: --storage URL.")
        self.run: PastRun = chain.run
        self._chain, self._given, self._say = chain, tolerance, say
        self._storage = chain.storage.url
        if "train" not in self.run.stages:
            what = "This run has trained no model that could be compared."
            raise ConfigError(what, field="X", value=self.run.id, remedy="Name a run that has finished.")
        if self.run.from_run is not None:
            what = f"This run took results from the run {self.run.from_run}, whose recipe may have been another."
            remedy = f"Reproduce that run: trainflow reproduce {self.run.from_run}."
            raise ConfigError(what, field="X", value=self.run.id, remedy=remedy)
        self.outcome = Outcome(run=self.run.id, to=to)
        spec = read_kept_spec(self._storage, self.run, say)
        self._check_sources(spec)
        self.spec = _quiet(mixed_alike(spec, chain.lineage.arguments.get("mixture", ())), to)
        self.spec.check()
        self._say_versions()

    def carry_out(self, run_pipeline: RunPipeline) -> Outcome:
        """Run it again, as `trainflow.flows.pipeline.run_pipeline` does, and compare. Raises TrainflowError."""
        prepared = run_pipeline(self.spec, only="prepare-data")
        prepared.raise_for_error()
        link, made = self._chain.lineage.stage("prepare-data"), prepared.manifests()["prepare-data"].content_digest
        if link is not None and made != link.content_digest:
            then = str(link.content_digest)[:12]
            raise _other_data(f"the prepared data has the digest {made[:12]}…, that of the run {then}…")
        result = run_pipeline(self.spec)
        result.raise_for_error()
        self._compare(result.manifests())
        return self.outcome

    # -- before it begins ---------------------------------------------------------------------------------------------

    def _check_sources(self, spec: PipelineSpec) -> None:
        sources = list(spec.prepare.sources)
        if absent := find_absent(sources):
            what = "A source of the data is not on this machine."
            remedy = "Put it there, as it was when the run prepared its data."
            raise ConfigError(what, field="prepare.sources", value=absent[0], remedy=remedy)
        recorded = [source.digest for source in self._chain.lineage.sources]
        now = fingerprints(sources, root=spec.root)
        changed = [source["source"] for source, old in zip(now, recorded, strict=False) if source["digest"] != old]
        if changed:
            raise _other_data(f"the source {changed[0]} is not the one that the run's data was made from")

    def _say_versions(self) -> None:
        then, now = self._chain.lineage.versions, describe_environment()
        for name, version in then.items():
            current = now.get(name, "not installed")
            if name != "trainer_lib" and current != version:
                self.outcome.versions[name] = (version, current)
                self._say(f"{name}: {version} in the run, {current} here")
        plan = Plan.of(self.spec)
        changes = describe_changes(self._storage, self.run, plan.early_keys)
        self.outcome.settings = [str(change) for change in changes if ".versions." not in change.field]
        for sentence in self.outcome.settings:
            self._say(f"differs from the run: {sentence}")
        if not self.outcome.versions and not changes:
            self._say("versions, settings and recipe are those of the run")

    # -- comparing ----------------------------------------------------------------------------------------------------

    def _compare(self, now: Mapping[str, StageManifest]) -> None:
        then = {stage: self._recorded(stage) for stage in self.run.stages if stage in now}
        for stage, old in then.items():
            if stage in _COMPARED:
                self.outcome.compared += _compare_files(old, now[stage])
        if "evaluate" in then:
            before, after = (flat_metrics(side["evaluate"].metrics) for side in (then, now))
            pairs = {name: (before[name], after[name]) for name in before if name in after}
            differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
            self.outcome.metrics = {name: pair for name, pair in differ.items() if not all(map(math.isnan, pair))}
        unequal = [file for file in self.outcome.compared if file["then"] != file["now"]]
        self.outcome.tolerance = self._tolerance(then, now)
        if not unequal and not self.outcome.metrics:
            return
        self._judge(unequal, has_metrics="evaluate" in then)

    def _recorded(self, stage: str) -> StageManifest:
        manifest, damage = look_up_under(self._storage, stage, self.run.stages[stage])
        if manifest is None:
            what = f"The result of {stage} in the run {f'is damaged: {damage}' if damage else 'is gone'}."
            remedy = "trainflow verify shows what of the run is left."
            raise ConfigError(what, field="X", value=self.run.id, remedy=remedy)
        return manifest

    def _tolerance(self, then: Mapping[str, StageManifest], now: Mapping[str, StageManifest]) -> float | None:
        facts = [side["train"].facts for side in (then, now)]
        devices = [training.device or _CPU for training in facts if isinstance(training, TrainFacts)]
        self.outcome.device = " and ".join(dict.fromkeys(devices))
        if self._given is not None:
            return self._given
        return None if all(device == _CPU for device in devices) else TOLERANCE

    def _judge(self, unequal: list[dict[str, Any]], *, has_metrics: bool) -> None:
        outcome, tolerance = self.outcome, self.outcome.tolerance
        for file in unequal:
            if not (file["then"] and file["now"]):
                outcome.differences.append(f"{file['path']} is in one of them only")
            elif tolerance is None or not has_metrics:
                outcome.differences.append(f"{file['path']} has other bytes")
        for name, (old, new) in outcome.metrics.items():
            if tolerance is None or not math.isclose(old, new, rel_tol=tolerance):
                outcome.differences.append(f"{name}: {old:.6g} in the run, {new:.6g} here")
        outcome.verdict = "different" if outcome.differences else "same metrics"


def _other_data(what: str) -> NotReproducibleError:
    return NotReproducibleError(f"The data differs: {what}.", field="data", remedy="Restore the data.")


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
    below = _COMPARED[old.stage]
    sides = [
        {file.path: file for file in side.files if file.path.startswith(below) and file.path.endswith(_FILES)}
        for side in (old, new)
    ]
    for path in sorted(sides[0].keys() | sides[1].keys()):
        then, now = (side[path].sha256 if path in side else None for side in sides)
        yield {"stage": old.stage, "path": path, "then": then, "now": now, "folders": [old.url, new.url]}
