"""Faults from outside over all five stages of a pipeline: does the same command end it correctly?

    make chaos-pipeline                              400 cases on a small recipe
    make chaos-pipeline N=100 RECIPE=digits
    python -m benchmarks.chaos_pipeline --count 400 --ledger chaos.jsonl     stopped and started again, it goes on
    python -m benchmarks.chaos_pipeline --case 17                            one case again, its files kept

A case is drawn from the seed and its number: SIGKILL, SIGTERM, SIGHUP or SIGSTOP of the orchestrator, the guard, the
agent, a worker or the embedded Prefect server; all processes at once; an MLflow server that is away, dies, is slow,
silent or fails; an S3 server likewise; a full disk; flipped, cut, swapped and missing files; two commands at once. The
fault comes at a moment that is seen from outside, in files and processes; nothing in the product knows of it. Then the
same command is run until it succeeds, at most three more times.

A case is held when the results of all stages (weights, metrics, predictions) have the bytes of a run that nothing
disturbed, one revision is published, no process is left, no lease is held, MLflow has one finished run with every point
once, and every Prefect run has ended. To be quick, four of five cases begin with the committed results of all stages
but the one that is hit. Exit code 1 when a case is not held.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import _chaos_checks as checks
from benchmarks._chaos_cases import PROJECTS, STAGES, Project, draw_case
from benchmarks._chaos_checks import Expected
from benchmarks._chaos_scene import MARK, Scene, Workplace, kill_processes, settings
from benchmarks._chaos_services import Services, can_mount, with_mounts
from benchmarks._result import RESULTS, publish
from tests.support.repository import ROOT

SIZES = {"smallest": (2, 600.0), "full": (400, 36_000.0)}  # cases, seconds


@dataclass(frozen=True)
class Reference:
    """A run that nothing disturbed.

    Attributes:
        storage: its storage.
        spans: stage -> seconds of its attempt; "" -> seconds of the command.
    """

    storage: Path
    expected: Expected
    spans: dict[str, float]


class Harness:
    """Runs cases on one project, beside servers that all of them share."""

    def __init__(self, project: Project, folder: Path, services: Services, seed: int, keep: Path | None) -> None:
        self._project = project
        self._folder = folder
        self._services = services
        self._seed = seed
        self._keep = keep
        self._references: dict[tuple[int, bool], Reference] = {}
        self._lock = threading.Lock()

    def run_case(self, number: int) -> dict[str, Any]:
        """Play a case and check its end. Returns the line of the ledger."""
        case = draw_case(self._seed, number, steps=self._project.steps, local=can_mount())
        reference = self._reference(case.processes, case.tracked)
        folder = self._folder / f"case-{number}"
        started_s = time.monotonic()
        storage = f"s3://chaos/case-{number}" if case.family == "store" else None
        home = folder / "home" if case.own_engine else self._services.home
        place = Workplace(folder, self._project, home, storage)
        with Scene(case, place, self._services, reference.spans) as scene:
            try:
                scene.play(reference.storage)
                if storage is not None:
                    self._services.bucket().get(storage, str(place.storage), recursive=True)
                problems = [*scene.problems, *_check(scene, reference.expected)]
            except Exception:  # a fault of the harness must not end hours of cases
                problems = [*scene.problems, f"harness: {traceback.format_exc()}"]
            self._tidy(place, problems)
        return {
            "case": number,
            "version": _version(),
            "seed": self._seed,
            "recipe": self._project.name,
            "kind": case.kind,
            "what": str(case),
            "hit": scene.seen.replace(f"{sys.prefix}/", "").replace(f"{ROOT}/", ""),
            "injected": scene.injected,
            "codes": scene.codes,
            "synced": scene.synced,
            "command_seconds": scene.seconds,
            "held": not problems,
            "problems": problems,
            "seconds": round(time.monotonic() - started_s, 1),
        }

    def _reference(self, processes: int, tracked: bool) -> Reference:
        with self._lock:
            if (processes, tracked) not in self._references:
                self._references[processes, tracked] = self._make_reference(processes, tracked)
            return self._references[processes, tracked]

    def _make_reference(self, processes: int, tracked: bool) -> Reference:
        name = f"reference-{processes}{'' if tracked else '-untracked'}"
        place = Workplace(self._folder / name, self._project, self._services.home)
        url = f"http://127.0.0.1:{self._services.mlflow.port}"
        place.overrides = settings(url, name, processes=processes, tracked=tracked)
        command = place.start()
        if command.process.wait() != 0:
            raise RuntimeError(f"The undisturbed run failed:\n{place.log.read_text()}")
        total = time.monotonic() - command.started
        curves = checks.read_points(self._services.mlflow.database, name)
        points = [point for _, curve in curves.values() for point in curve]
        spans = {stage: _seconds(place.storage / "stages" / stage) for stage in STAGES}
        return Reference(place.storage, Expected.of(place.storage, points), {**spans, "": total})

    def _tidy(self, place: Workplace, problems: Sequence[str]) -> None:
        """Keep the folder of a case that is not held, where that is wanted; remove it otherwise."""
        if self._keep is not None and problems:
            kept = self._keep / place.folder.name
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(place.folder, kept, ignore_dangling_symlinks=True)
        shutil.rmtree(place.folder, ignore_errors=True)


@functools.cache
def _version() -> str:
    """The commit that the cases run, marked when files are changed; the version where there is no repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or metadata.version("trainflow")


def _seconds(stage: Path) -> float:
    [first], [commit] = stage.glob("*/attempts/0001.json"), stage.glob("*/COMMIT.json")
    return commit.stat().st_mtime - first.stat().st_mtime


def _check(scene: Scene, expected: Expected) -> list[str]:
    case, place = scene.case, scene.place
    problems = [
        *checks.check_results(place.storage, expected),
        *checks.check_publication(place.storage, expected),
        *checks.check_leases(place.storage),
        *checks.check_prefect(place.home, place.folder, has_worked=place.has_worked()),
    ]
    if case.tracked:
        trained = case.whole or case.moment.stage == "train"
        curve = trained and case.family != "damage"
        problems += checks.check_mlflow(scene.database, f"case-{case.number}", expected.points, whole_curve=curve)
        problems += checks.check_registry(scene.database, f"case-{case.number}", whole=curve)
        problems += checks.check_spool(place.spools())
    return problems


# -- the ledger --------------------------------------------------------------------------------------------------------


class Ledger:
    """JSON lines: the newest of a case counts. A line that was torn does not, so its case is run again."""

    def __init__(self, path: Path | None, seed: int, recipe: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._newest: dict[int, dict[str, Any]] = {}
        self.is_closed = False
        if path is not None and path.exists():
            self._read(path, seed, recipe)

    def _read(self, path: Path, seed: int, recipe: str) -> None:
        text = path.read_text(encoding="utf-8")
        for part in text.splitlines():
            try:
                line = json.loads(part)
            except ValueError:
                continue
            if (line["seed"], line["recipe"]) == (seed, recipe):
                self._newest[line["case"]] = line
        if text and not text.endswith("\n"):
            path.write_text(f"{text}\n", encoding="utf-8")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """One line for every case, in the order of their numbers."""
        return [line for _, line in sorted(self._newest.items())]

    def left(self, count: int, *, again: bool = False) -> list[int]:
        """The numbers below `count` that have no line; with `again`, those that were not held, too."""
        done = {line["case"] for line in self.lines if line["held"] or not again}
        return [number for number in range(count) if number not in done]

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, unless the ledger is closed: a case whose servers are being ended says nothing."""
        with self._lock:
            if self.is_closed:
                return
            self._newest[line["case"]] = line
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            verdict = "held" if line["held"] else "NOT HELD"
            print(f"{line['case']:4d} {verdict:8s} {line['seconds']:6.1f} s  {line['what']}", flush=True)
            for problem in line["problems"]:
                print(f"       {problem}", flush=True)


def run_cases(harness: Harness, ledger: Ledger, numbers: Iterable[int], *, seconds: float, jobs: int) -> None:
    """Run cases, `jobs` of them at a time, until all are done or the time is over."""
    deadline = time.monotonic() + seconds

    def run(number: int) -> None:
        if time.monotonic() < deadline and not ledger.is_closed:
            ledger.add(harness.run_case(number))

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(run, number) for number in numbers]:
            done.result()


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The cases by kind as Markdown: held, not held with their numbers, and those that ended before the fault came."""
    kinds = sorted({line["kind"] for line in lines})
    rows = ["| fault | cases | held | fault came too late | not held |", "|---|---|---|---|---|"]
    for kind in kinds:
        these = [line for line in lines if line["kind"] == kind]
        failed = [str(line["case"]) for line in these if not line["held"]]
        late = sum(not line["injected"] for line in these)
        rows.append(f"| {kind} | {len(these)} | {len(these) - len(failed)} | {late} | {', '.join(failed) or '-'} |")
    held = sum(line["held"] for line in lines)
    late = sum(not line["injected"] for line in lines)
    return "\n".join([*rows, f"| all | {len(lines)} | {held} | {late} | {len(lines) - held} |"])


def reasons(lines: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Violation -> number of cases."""
    found = [name for line in lines for name in {each.partition(":")[0] for each in line["problems"]}]
    return dict(collections.Counter(found))


@contextlib.contextmanager
def _root(ledger: Ledger) -> Iterator[Path]:
    """A folder for all of it; when it is left, or a signal ends this process, no process and no file of it stays."""
    with tempfile.TemporaryDirectory(prefix="tfchaos-") as name:
        root = Path(name)

        def leave(*signalled: object) -> None:
            ledger.is_closed = True
            while root.exists():  # again: what a thread made in between
                kill_processes(root)
                shutil.rmtree(root, ignore_errors=True)
                time.sleep(0.2)
            os._exit(1)  # threads that wait for a case must not keep us

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, leave)
        os.environ[MARK] = name  # every process that we start inherits it
        yield root
        kill_processes(root)


def main() -> int:
    """Run the cases, print the table, and save on request. Returns 1 when a case was not held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="smallest")
    parser.add_argument("--recipe", choices=list(PROJECTS), default="small")
    parser.add_argument("--count", type=int, help="cases, those in the ledger included")
    parser.add_argument("--case", type=int, action="append", help="run this case alone; repeatable")
    parser.add_argument("--seconds", type=float, help="time after which no further case is started")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="cases at a time")
    parser.add_argument("--ledger", type=Path, help="JSON lines; cases that are in it are not run again")
    parser.add_argument("--again", action="store_true", help="run the ledger's cases that were not held again")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the files of cases that are not held go")
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, default=None, metavar="FOLDER")
    chosen = parser.parse_args()
    with_mounts()
    count = SIZES[chosen.size][0] if chosen.count is None else chosen.count
    seconds = SIZES[chosen.size][1] if chosen.seconds is None else chosen.seconds
    ledger = Ledger(chosen.ledger, chosen.seed, chosen.recipe)
    numbers = chosen.case or ledger.left(count, again=chosen.again)
    started_s = time.monotonic()
    if numbers:
        with _root(ledger) as place, Services(place / "servers") as services:
            harness = Harness(PROJECTS[chosen.recipe], place, services, chosen.seed, chosen.keep)
            run_cases(harness, ledger, numbers, seconds=seconds, jobs=chosen.jobs)
    lines = [line for line in ledger.lines if line["case"] in chosen.case] if chosen.case else ledger.lines
    found = {
        "recipe": chosen.recipe,
        "seed": chosen.seed,
        "versions": sorted({line["version"] for line in lines}),
        "cases": len(lines),
        "held": sum(line["held"] for line in lines),
        "fault_came_too_late": sum(not line["injected"] for line in lines),
        "case_seconds": round(sum(line["seconds"] for line in lines), 1),
        "seconds": round(time.monotonic() - started_s, 1),
        "not_held": {line["case"]: line["problems"] for line in lines if not line["held"]},
        "reasons": reasons(lines),
        "held_after_sync": sum(line["held"] and line.get("synced", False) for line in lines),
    }
    publish("chaos_pipeline", f"{chosen.recipe}-{len(lines)}-cases", found, chosen.save)
    print(table(lines))
    return 0 if lines and found["held"] == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
