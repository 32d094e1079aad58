"""`python -m benchmarks.gpu --dry` with torch, transformers, accelerate, safetensors, NumPy and nothing of trainflow's.

The environment is a new one into whose site-packages the distributions that those five require are linked.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.support.launched import wait_until
from tests.support.police import session_processes
from tests.support.repository import ROOT

NEEDED = ("torch", "transformers", "accelerate", "safetensors", "numpy")
ABSENT = ("prefect", "mlflow", "pydantic_settings", "sqlalchemy", "fastapi", "datasets", "pandas", "pyarrow", "peft")
TRAINS = f"""
import importlib.util, torch
from trainer_lib import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        return {{"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}}

def train(steps, resume):
    args = TrainingArguments(output_dir="out", max_steps=steps, save_steps=2, save_strategy="steps", use_cpu=True)
    rows = [{{"x": torch.ones(2), "labels": torch.tensor(float(n))}} for n in range(16)]
    trainer = Trainer(model=Model(), args=args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step

train(2, None)
print([name for name in {ABSENT!r} if importlib.util.find_spec(name)], train(4, True))
"""


def _required(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """The distributions with all that they require, without extras."""
    known: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known[name] = metadata.distribution(name)
        wanted = [Requirement(text) for text in known[name].requires or ()]
        waiting += [item.name for item in wanted if item.marker is None or item.marker.evaluate({"extra": ""})]
    return known


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for distribution in _required(NEEDED).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


def environment(out: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": "", "OUT": str(out)}


def test_the_trainer_trains_and_resumes_without_the_pipelines_packages(python: Path, tmp_path: Path) -> None:
    command = [str(python), "-W", "ignore", "-c", TRAINS]
    path = {**environment(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] 4"


def test_every_row_is_written_as_it_comes_and_a_failed_one_does_not_end_the_run(python: Path, tmp_path: Path) -> None:
    broken = next(python.parents[1].glob("lib/python3*/site-packages")) / "bitsandbytes"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('it is broken')\n")
    chosen = ("--only", "7", "--only", "4", "--only", "1 gpt2")
    others = {process.pid for process in session_processes()}
    command = [str(python), "-m", "benchmarks.gpu", "--dry", *chosen]
    with subprocess.Popen(command, cwd=ROOT, env=environment(tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        before = list(itertools.takewhile(lambda line: not line.startswith("1."), lines))
        written = json.loads((tmp_path / "gpu.json").read_text())  # the rows before this one
        assert any("lines in" in line for line in lines)
    shutil.rmtree(broken)  # with what Python compiled of it
    # The server that forks its jobs has torch to unload when it ends, right after.
    wait_until(lambda: {process.pid for process in session_processes()} <= others)
    table = {(finding["row"][0], finding["case"]): finding["measured"] for finding in written["findings"]}
    assert {"7", "4"} <= {row for row, _ in table}, before
    assert "it is broken" in table["7", "adamw_bnb_8bit"]
    assert table["7", "adamw_torch_8bit"] == "passed over: torchao is not installed"
    assert table["7", "liger"] == "passed over: liger_kernel is not installed"
    assert "bytes equal: True" in table["4", "ours_background"]
    page = (tmp_path / "gpu.md").read_text()
    assert "torchao, liger-kernel, deepspeed." in page.partition("Not installed: ")[2]
    assert all(measured in page for measured in table.values())


@pytest.mark.timeout(1500)
def test_every_row_runs_or_names_what_is_missing(python: Path, tmp_path: Path) -> None:
    command = [str(python), "-m", "benchmarks.gpu", "--dry", "--seconds", "1200"]
    with tempfile.TemporaryDirectory() as temporary:  # torch.compile leaves a folder there
        path = {**environment(tmp_path), "TMPDIR": temporary}
        done = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, check=False, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    findings: list[dict[str, Any]] = json.loads((tmp_path / "gpu.json").read_text())["findings"]
    assert {finding["row"].partition(",")[0] for finding in findings} == {
        *("1. gpt2", "1. llama", "2. waits per quiet step", "3. killed and resumed", "4. saving 1.26 GB of state"),
        *("5. NCCL", "6. memory", "7. packages", "8. perplexity", "8. generation"),
    }
    bad = [finding for finding in findings if "failed" in finding["measured"] or "not measured" in finding["measured"]]
    assert not bad
    missing = [finding["measured"] for finding in findings if "passed over" in finding["measured"]]
    assert missing == [
        f"passed over: {name} is not installed"
        for name in ("deepspeed", "bitsandbytes", "bitsandbytes", *["torchao"] * 3, "liger_kernel", "torchao")
    ]
    same = [finding for finding in findings if finding["goal"] in ("identical", "the same weights", "a typed error")]
    assert all(finding["held"] for finding in same if "passed over" not in finding["measured"])
