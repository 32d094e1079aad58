"""A pipeline's spec as an object: load it, ask what a run would do, run it; and what came of its sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainflow.flows.spec.spec import PipelineSpec, load_spec, parse_spec
from trainflow.flows.stages import require_stage
from trainflow.recorded_run import Run, run_here

if TYPE_CHECKING:
    import pandas as pd

    from trainflow.flows.planning.plan import Plan
    from trainflow.flows.sweeps.sweep_result import SweepResult


class Spec:
    """A checked spec.

    Attributes:
        settings: every field, as `trainflow.flows.spec.spec.PipelineSpec` describes it.
    """

    def __init__(self, settings: PipelineSpec) -> None:
        self.settings = settings

    @classmethod
    def load(cls, path: str | Path, *overrides: str) -> Spec:
        """Read a spec from a YAML or JSON file.

        Args:
            overrides: fields to set, as on the command line: ``"train.args.learning_rate=1e-3"``.

        Raises:
            ConfigError: the file cannot be read, or a field is unknown or has a wrong value.
        """
        return cls(load_spec(path, overrides))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Spec:
        """Make a spec from its fields; paths among them are absolute, or start from the working directory.

        Raises:
            ConfigError: a field is unknown or has a wrong value.
        """
        settings = parse_spec(fields)
        settings.check()
        return cls(settings)

    @property
    def name(self) -> str:
        """The name of the pipeline."""
        return self.settings.name

    @property
    def storage(self) -> str:
        """The folder or URL below which everything is kept."""
        return self.settings.storage

    def run(
        self,
        *,
        only: str | None = None,
        start: str | None = None,
        force: Sequence[str] = (),
        from_run: str | None = None,
        progress: bool = True,
    ) -> Run:
        """Run the pipeline in this process, and return the run. What is committed already is not run again.

        Workers train in processes of their own, so this works in a notebook and inside of a running event loop, which
        it blocks: there, ``await asyncio.to_thread(spec.run)``.

        Args:
            only: run this stage alone.
            start: run from this stage on.
            force: stages that run again even if they are committed.
            from_run: id of an earlier run that gives the stages before the first.
            progress: show how it goes; False: show nothing.

        Raises:
            TrainflowError: a stage failed. What it had committed stays, and the same call continues.
        """
        only, start = require_stage(only, "only"), require_stage(start, "start")
        forced = [stage for name in force if (stage := require_stage(name, "force"))]
        choice = {"only": only, "start": start, "force": forced, "from_run": from_run}
        return Run.of(run_here(self.settings, progress=progress, **choice))

    def sweep(self, *, progress: bool = True) -> SweepResult:
        """Run the trials that its section `sweep` describes, in processes of their own, and return what they came to.

        The same call continues with a sweep that was interrupted; no trial runs twice.

        Args:
            progress: show a line for each trial; False: show nothing.

        Raises:
            ConfigError: the spec has no sweep, or one that cannot work.
            TrainflowError: it ended before its last trial. What had ended stays, and the same call continues.
        """
        from trainflow.flows.cli import terminal
        from trainflow.flows.cli.commands import sweep as shown
        from trainflow.flows.sweeps.sweeping import run_sweep
        from trainflow.flows.sweeps.trial_specs import sweep_of

        display = shown.SweepDisplay(terminal.console(), sweep_of(self.settings), quiet=not progress)
        with display.status():
            result = run_sweep(self.settings, listener=display)
        result.raise_for_error()
        return result

    def why(self) -> pd.DataFrame:
        """Whether each stage is committed, and if not, what differs: columns hit, certain and reason. Runs nothing.

        Raises:
            ConfigError: the recipe or a source cannot be read. StorageError: the storage cannot be read.
        """
        import pandas as pd

        rows = [(found.stage, found.hit, found.certain, found.reason) for found in self._planned().reasons.values()]
        return pd.DataFrame(rows, columns=["stage", "hit", "certain", "reason"]).set_index("stage")

    def plan(self, *, probe: bool = False) -> Mapping[str, Any]:
        """The actions and costs of a run: stages, steps, memory under each strategy, room, time, and what cannot work.

        Args:
            probe: prepare the data if it is not, train a few real steps, and measure time and memory.

        Returns:
            What ``trainflow plan --json`` prints.
        """
        from trainflow.flows.planning.full_plan import plan_in_full

        return plan_in_full(self._planned(), probe=probe).to_dict()

    def _planned(self) -> Plan:
        from trainflow.flows.planning.plan import Plan

        return Plan.of(self.settings)

    def __repr__(self) -> str:
        return f"Spec({self.name!r}, storage={self.storage!r})"
