"""Has an engine place a launch and stays until it ends. ``python -m trainer_lib.engines.driver <run dir>``.

The guard of the launch starts it. What the leading member reports goes into the run directory, as a worker on this
machine would have written it. SIGTERM comes when the launch is cancelled, or when its owner is gone: then a job that
continues without this process is left alone, for the same command to take up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_lib.base.json_text import parse_record
from trainer_lib.engines.base import Alive, Ended, Engine, Job, Lost, State, open_engine
from trainer_lib.errors import InfrastructureError, Preempted, TrainflowError, first_line, from_record
from trainer_lib.launch.run_dir import MARK, RunDir, read_settings

POLL_S = 0.25
# How long the last lines of a machine may take to be seen here.
REPORT_S = 20.0
LOST_S = 2.0  # of one that was lost, which may have written nothing
_OURS = (MARK, "TRAINFLOW_OWNER", "TRAINFLOW_GUARD")


class Driver:
    """Makes the calls of one engine for one job."""

    def __init__(self, run_dir: RunDir, engine: Engine, job: Job) -> None:
        self._run_dir = run_dir
        self._engine = engine
        self._job = job
        # What the leading member has reported.
        self._result: dict[str, Any] | None = None
        self._reported: TrainflowError | None = None
        self._asked: float | None = None
        self._stopped = False
        self._doing = ""
        self._failed: float | None = None

    def stop(self, *_: object) -> None:
        """Have `run` end what was placed, or leave it alone."""
        self._stopped = True

    def run(self) -> int:
        """Place the job and stay until it has ended. Returns the exit code."""
        try:
            self._engine.place(self._job)
            state = self._watch()
            if state is None:
                return 128 + signal.SIGTERM
            failure = self._failure(state)
        except TrainflowError as error:
            failure = error
        except Exception as error:
            reason = f"The engine failed: {type(error).__name__}: {first_line(error)}"
            remedy = "The same command tries again; the traceback is in the details (--debug)."
            failure = InfrastructureError(reason, remedy=remedy, details=traceback.format_exc())
        if not self._result or failure is not None:
            record = (failure or InfrastructureError("The engine ended without a result.")).to_record()
            self._run_dir.write_json("agent.json", {"failures": [], "failure": record})
            if record["step"] is not None:  # a launch that was cancelled says at which step it was saved
                stop = {**record, "class": Preempted.__name__, "time": time.time()}
                self._run_dir.write_json("error-rank0.json", stop)
        else:
            self._run_dir.write_json("result.json", self._result)
        self._engine.end(now=True)
        return 0 if failure is None else 1

    def _watch(self) -> State | None:
        """Pass on what comes, until there is a result or nothing is alive; None: left alone."""
        while True:
            state = self._poll()
            if self._result is not None or not isinstance(state, Alive):
                # A shared file system shows the last lines of a machine that has ended late.
                deadline = time.monotonic() + (REPORT_S if isinstance(state, Ended) else LOST_S)
                while self._result is None and self._reported is None and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                    self._poll()
                return state
            goes_on = state.doing != self._doing
            if goes_on:
                self._doing = state.doing
                self._event({"t": time.time(), "event": "wait", "message": state.doing})
            if self._is_overdue():
                self._engine.end(now=True)
            if self._stopped:
                if self._engine.outlives_driver and not self._run_dir.was_cancelled():
                    return None
                self._end()
            if not goes_on:  # else the next thing to do may be due already
                time.sleep(POLL_S)

    def _end(self) -> None:
        """Ask the workers to save, once, and end everything when they have not within the grace time."""
        if self._asked is None:
            self._asked = time.monotonic()
            self._engine.end(now=False)
        elif time.monotonic() - self._asked > self._job.config.grace_s:
            self._asked = float("inf")
            self._engine.end(now=True)

    def _is_overdue(self) -> bool:
        """Whether the leading member has failed long ago, and others still hold their machines."""
        if self._reported is None or not self._engine.addresses():
            self._failed = None
            return False
        self._failed = self._failed or time.monotonic()
        return time.monotonic() - self._failed > self._job.config.grace_s + REPORT_S

    def _poll(self) -> State:
        """Take the new lines: reports of the member, and whatever else its machine has written; return the state."""
        lines, state = self._engine.poll()
        for line in lines:
            report = parse_record(line) if line.startswith("{") else {}
            if "event" in report:
                self._event(report["event"])
            elif "result" in report:
                self._result = report["result"]
            elif "failure" in report:
                self._reported = from_record(report["failure"])
            elif "started" in report:  # for the second time where the cluster has put the job back into its queue
                self._reported = None
            else:
                print(report.get("line", line), flush=True)  # noqa: T201 - the owner reads this process's output
        return state

    def _event(self, event: dict[str, Any]) -> None:
        with (self._run_dir.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def _failure(self, state: State) -> TrainflowError | None:
        if self._result is not None:
            return None
        reported = self._reported
        if isinstance(state, Lost):
            # Why the machines went explains what the workers report of it, unless these have saved in time.
            if reported is None or isinstance(reported, InfrastructureError):
                return state.failure
            if not isinstance(reported, Preempted) or isinstance(state.failure, InfrastructureError):
                return reported
            failure = state.failure
            if reported.step is not None:  # at which the workers were saved
                failure.step = reported.step
                failure.message = f"{failure.message.rstrip('.')}; saved at step {reported.step}."
                failure.args = (failure.message,)
            return failure
        if reported is not None:
            return reported
        code = state.code if isinstance(state, Ended) else 1
        return InfrastructureError(
            f"The leading machine's part ended with exit code {code} and without a result.",
            field="train.launch.engine",
            value=self._job.config.engine,
            remedy="The last lines that the engine wrote are in the details (--debug).",
            details=state.tail if isinstance(state, Ended) else None,
        )


def main(argv: list[str]) -> int:
    """Read the launch from the run directory and see it to its end. Returns the exit code."""
    run_dir = RunDir(Path(argv[0]))
    run_dir.record_process("agent", os.getpid())
    # What this process starts is another machine's, also where it is this one: the run directory must not claim it.
    for name in _OURS:
        os.environ.pop(name, None)
    config, request, written = read_settings(run_dir)
    env = {name: os.environ[name] for name in written["variables"] if name in os.environ}
    engine = open_engine(str(config.engine))
    if not engine.restarts_workers:
        config = replace(config, max_restarts=0)
    driver = Driver(run_dir, engine, Job(request, config, env, written["shared"]))
    signal.signal(signal.SIGTERM, driver.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return driver.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
