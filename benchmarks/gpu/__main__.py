"""Measure on one GPU what trainflow claims of GPUs: `make gpu`, or

    OUT=results python -m benchmarks.gpu --seconds 480
    python -m benchmarks.gpu --dry                        # all of it on the CPU with the tiniest sizes

Needs torch, transformers, accelerate and safetensors only; other packages are used where they are, and named where they
are missing. Rows come in the order of their worth. Every job is a process with a time limit; a row that fails is shown
and the next begins. After every row, `gpu.json` and `gpu.md` are written into the folder OUT.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import processes
from benchmarks.gpu.page import describe_machine, render


@dataclass(frozen=True)
class Finding:
    """One line of the table; `held` is None where there is no goal."""

    row: str
    case: str
    measured: str
    goal: str = ""
    held: bool | None = None


class Failed(Exception):
    """A job ended without a result; the message says why."""


Together = tuple[str, float, list[dict[str, Any]]]


class Lab:
    """Starts jobs, while there is time; those that are not timed at the same time, half as many as there are cores."""

    def __init__(self, seconds: float, *, dry: bool) -> None:
        self.dry = dry
        self.answers: dict[str, Any] = {}
        self._ends = time.monotonic() + seconds
        self._outputs = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2))
        self._begun: dict[str, concurrent.futures.Future[dict[str, Any] | Failed]] = {}
        processes.prepare(dry=dry)
        try:
            self.run("imported", 120)
        except Failed:  # CUDA was in use before the fork
            os.environ[processes.FORKS] = "0"

    def run(self, module: str, limit_s: float, **settings: Any) -> dict[str, Any]:
        """Run `benchmarks.gpu.<module>` in a process and return its result.

        Raises:
            Failed: it failed, gave no result, or there was no time.
        """
        left = self._ends - time.monotonic()
        if left < 5:
            raise Failed("not measured: no time was left")
        limit_s = min(left, limit_s * (3 if self.dry else 1))
        name = _name(module, settings)
        begun = time.monotonic()
        output = Path(self._outputs.name, f"{next(self._numbers)}.txt")
        job = processes.Job(module, {**settings, "dry": self.dry}, output)
        stopped = job.wait(limit_s) is None
        result = job.result()
        if result is None:
            text = job.text() + (f"\nstopped after {limit_s:.0f} s" if stopped else "")
            self.answers[name] = {"failed": text[-3000:]}
            raise Failed(_last_line(text))
        self.answers[name] = result
        result["job_s"] = round(time.monotonic() - begun, 1)
        return dict(result)

    def begin(self, together: Iterable[Together]) -> None:
        """Begin jobs whose results `run_together` returns later."""
        for module, limit_s, cases in together:
            for case in cases:
                if (name := _name(module, case)) not in self._begun:
                    self._begun[name] = self._pool.submit(self._attempt, module, limit_s, case)

    def run_together(self, module: str, limit_s: float, cases: list[dict[str, Any]]) -> list[dict[str, Any] | Failed]:
        """Wait for jobs, and start those that are not running yet."""
        self.begin([(module, limit_s, cases)])
        return [self._begun[_name(module, case)].result() for case in cases]

    def _attempt(self, module: str, limit_s: float, case: dict[str, Any]) -> dict[str, Any] | Failed:
        try:
            return self.run(module, limit_s, **case)
        except Failed as failure:
            return failure


def _name(module: str, settings: dict[str, Any]) -> str:
    return f"{module} {json.dumps(settings)}"


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return "failed: " + (lines[-1][:300] if lines else "no output")


# -- the rows ---------------------------------------------------------------------------------------------------------


def throughput(lab: Lab, model: str, *, compiled: bool = False, limit_s: float = 60) -> Iterator[Finding]:
    """Tokens per second, by hand, by transformers' Trainer and by ours."""
    row = f"1. {model}, bf16, {'torch.compile' if compiled else 'eager'}"
    results: dict[str, dict[str, Any]] = {}
    batch = 0
    for loop in ("hand", "peer", "ours"):
        results[loop] = lab.run("throughput", limit_s, loop=loop, model=model, batch=batch, compiled=compiled)
        batch = results[loop]["batch"]
    for loop, result in results.items():
        mfu = "" if result["mfu"] is None else f", MFU {100 * result['mfu']:.1f} %"
        words = f"{result['tokens_per_s']:,.0f} tokens/s{mfu}, peak {result['peak_bytes'] / 2**30:.1f} GiB"
        yield Finding(row, f"{loop}, {result['batch']} x {result['length']}", words)
    for other, goal in (("hand", 0.99), ("peer", 1.05)):
        ratio = results["ours"]["tokens_per_s"] / results[other]["tokens_per_s"]
        yield Finding(row, f"ours / {other}", f"{ratio:.3f}", f"at least {goal}", ratio >= goal)


def quiet_steps(lab: Lab) -> Iterator[Finding]:
    """Waits of the host for the device."""
    cases = QUIET[2]
    for case, result in zip(cases, lab.run_together(*QUIET), strict=True):
        name = f"{case['loop']}, {case['case']}"
        if isinstance(result, Failed):
            yield Finding("2. waits per quiet step", name, str(result), held=False)
            continue
        waits = {wait: count for wait, count in result["waits_per_step"].items() if count}
        words = ", ".join(f"{wait} {count:.2g}" for wait, count in waits.items()) or "none"
        ours = case["loop"] == "ours"
        strict = f"; 50 steps that may not wait: {result['strict']}" if ours else ""
        held = (not waits and result["strict"] in ("passed", "not tried")) if ours and not lab.dry else None
        yield Finding("2. waits per quiet step", name, words + strict, "none" if ours else "", held)


def resumes(lab: Lab, row: str, together: Together) -> Iterator[Finding]:
    """Killed and resumed: the same bits?"""
    for case, result in _by_case(lab, together).items():
        if isinstance(result, Failed):
            yield Finding(row, case, str(result), "identical", False)
        elif "missing" in result:
            yield Finding(row, case, f"passed over: {result['missing']} is not installed")
        else:
            words = f"{'identical' if result['identical'] else 'DIFFERS'}, from {result['resumed from']}"
            words += f", optimizer state {result['state_bytes'] / 2**20:.1f} MiB"
            again = result["two whole runs are identical"]
            words += "" if again is None else f"; {result['differing']}; two whole runs are identical: {again}"
            held = None if again is False else result["identical"]  # its kernels differ between runs
            yield Finding(row, case, words, "identical", held)


def saves(lab: Lab) -> Iterator[Finding]:
    """Blocked by a save."""
    row = "4. saving 1.26 GB of state"
    result = lab.run("saves", 90)
    for way in ("ours_waiting", "ours_background", "dcp_waiting", "dcp_background"):
        values = result[way]
        slowdown = "" if values["slowdown"] is None else f", steps {values['slowdown']:.2f} x meanwhile"
        first = f"(the first {1e3 * values['first']:.1f} ms)"
        words = f"blocked {1e3 * values['blocked']['median']:.1f} ms {first}, committed after"
        equal = "" if values["bytes_equal"] is None else f", bytes equal: {values['bytes_equal']}"
        yield Finding(row, way, f"{words} {values['until_known']['median']:.2f} s{slowdown}{equal}")
    ratio = result["blocked_ratio"]
    yield Finding(row, "background / waiting", f"{ratio:.4f}", "at most 0.03", ratio <= 0.03)
    yield Finding(row, "ours / torch's, both in the background", f"{result['blocked_ours_to_dcp']:.2f}")


def strategies(lab: Lab) -> Iterator[Finding]:
    """Losses with a process group of one."""
    row = "5. NCCL, one process"
    results = _by_case(lab, GROUPS)
    for case, result in results.items():
        if isinstance(result, Failed):
            yield Finding(row, case, str(result), held=False)
        elif "missing" in result:
            yield Finding(row, case, f"passed over: {result['missing']} is not installed")
        elif not case.startswith("alone"):
            expected = results["alone bf16" if case.endswith("bf16") else "alone"]
            if isinstance(expected, Failed):
                continue
            apart = max(abs(a - b) for a, b in zip(result["losses"], expected["losses"], strict=True))
            most = 0.02 if case.endswith("bf16") else 1e-4
            words = f"losses differ by at most {apart:.2g}, {result['wrapper']}, {result['backend']}"
            words += f", {result['peak_bytes'] / 2**20:,.0f} MiB"
            words += "; a process that is alone has nothing to average: not wrapped" if case == "DDP" else ""
            yield Finding(row, case, words, f"at most {most}", apart <= most)


def memory(lab: Lab) -> Iterator[Finding]:
    """The report, and memory that runs out."""
    row = "6. memory"
    for case, result in _by_case(lab, SHORT).items():
        if isinstance(result, Failed):
            yield Finding(row, case, str(result), held=False)
        elif case == "report":
            ratio = result["reported_peak"] / result["allocator_peak"]
            words = f"{result['reported_peak'] / 2**20:,.1f} MiB, {ratio:.4f} x the allocator's peak"
            yield Finding(row, case, words, "0.99 to 1.01", 0.99 <= ratio <= 1.01)
        elif case == "evaluation":
            words = ", ".join(f"{batch}: {told}" for batch, told in result.items() if batch != "job_s")
            yield Finding(row, case, words, "a typed error", "OutOfMemoryError of" in words)
        else:
            words = f"micro-batch {result['micro_batch']}, weights of that micro-batch: {result['same_weights']}"
            yield Finding(row, case, words, "the same weights", result["same_weights"])


def evaluations(lab: Lab) -> Iterator[Finding]:
    """Evaluation and generation."""
    results = {loop: lab.run("evaluate", 90, loop=loop, tasks=list(EVALUATED)) for loop in ("hand", "peer", "ours")}
    for task, goal in EVALUATED.items():
        row = f"8. {task}"
        for loop, result in results.items():
            yield Finding(row, loop, f"{result[task]['samples_per_s']:,.1f} samples/s, loss {result[task]['loss']:.4f}")
        ratio = results["ours"][task]["samples_per_s"] / results["hand"][task]["samples_per_s"]
        yield Finding(row, "ours / hand", f"{ratio:.3f}", f"at least {goal}", ratio >= goal)


def _by_case(lab: Lab, together: Together) -> dict[str, dict[str, Any] | Failed]:
    return dict(zip([case["case"] for case in together[2]], lab.run_together(*together), strict=True))


def _cases(module: str, limit_s: float, *names: str) -> Together:
    return module, limit_s, [{"case": name} for name in names]


QUIET: Together = (
    *("quiet_steps", 90),
    [
        *({"loop": loop, "case": "bf16"} for loop in ("hand", "peer", "ours")),
        *({"loop": "ours", "case": case} for case in ("fp16", "accumulation 4", "label smoothing")),
    ],
)
RESUMED = _cases(
    *("resumes", 120, "compile", "bf16", "fp16 with scaler", "gradient checkpointing", "accumulation 4"),
    "channels_last convolution",
)
PACKAGED = _cases(
    *(
        "resumes",
        120,
        "adamw_bnb_8bit",
        "QLoRA",
        "adamw_torch_8bit",
        "adamw_torch_4bit",
        "adamw_torch_bf16_sr",
        "liger",
    ),
    "fp8",
)
GROUPS = _cases(
    *("strategies", 120, "alone", "DDP", "FSDP2", "FSDP2 offload", "DeepSpeed ZeRO 2", "alone bf16", "FSDP2 bf16"),
)
SHORT = _cases("memory", 90, "report", "retry", "search", "evaluation")
EVALUATED = {"perplexity": 0.97, "generation": 0.97}
ROWS: dict[str, Callable[[Lab], Iterator[Finding]]] = {
    "1 gpt2": lambda lab: throughput(lab, "gpt2"),
    "1 llama": lambda lab: throughput(lab, "llama"),
    "2": quiet_steps,
    "3": lambda lab: resumes(lab, "3. killed and resumed", RESUMED),
    "5": strategies,
    "6": memory,
    "7": lambda lab: resumes(lab, "7. packages, killed and resumed", PACKAGED),
    "4": saves,
    "8": evaluations,
    "1 gpt2 compiled": lambda lab: throughput(lab, "gpt2", compiled=True, limit_s=120),
    "1 llama compiled": lambda lab: throughput(lab, "llama", compiled=True, limit_s=120),
}
#: Rows whose jobs are not timed: they run together, the longest first.
UNTIMED = {"3": RESUMED, "7": PACKAGED, "2": QUIET, "5": GROUPS, "6": SHORT}


def main() -> int:
    """Run the rows; the exit code is 1 when a job failed or a goal was missed, which a dry run does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--dry", action="store_true", help="on the CPU, with the tiniest sizes")
    parser.add_argument("--only", action="append", choices=list(ROWS), help="may be repeated")
    chosen = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    lab = Lab(chosen.seconds, dry=chosen.dry)
    begun, findings = time.monotonic(), []
    machine = {**describe_machine(chosen.dry), "forked": os.environ[processes.FORKS] == "1"}
    rows = chosen.only or list(ROWS)
    for name in rows:
        if name in UNTIMED:
            lab.begin(together for row, together in UNTIMED.items() if row in rows)
        try:
            for finding in ROWS[name](lab):
                findings.append(finding)
                verdict = {True: "held", False: "MISSED", None: ""}[finding.held]
                print(f"{finding.row} | {finding.case} | {finding.measured} | {finding.goal} | {verdict}", flush=True)
        except Failed as error:
            findings.append(Finding(name, "", str(error), held=False))
            print(f"{name} | {error}", flush=True)
        except Exception:  # a fault of this script: shown, and the next row begins
            findings.append(Finding(name, "", traceback.format_exc(limit=-2), held=False))
            print(traceback.format_exc(), flush=True)
        seconds = time.monotonic() - begun
        out.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine, "seconds": round(seconds, 1), "answers": lab.answers}
        lines = [asdict(finding) for finding in findings]
        _write(out / "gpu.json", json.dumps({**record, "findings": lines}, indent=1) + "\n")
        _write(out / "gpu.md", render(machine, seconds, lines))
    print(f"{len(findings)} lines in {time.monotonic() - begun:.0f} s; {out / 'gpu.md'}")
    failed = any(finding.held is False and (not chosen.dry or not finding.goal) for finding in findings)
    return int(failed)


def _write(path: Path, text: str) -> None:
    """Replace a file: a reader has all rows so far, also when the process is killed."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
