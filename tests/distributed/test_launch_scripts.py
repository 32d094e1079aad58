"""`python script.py` under everything that may start it: the same script, unchanged, trains on all its processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT

# The script of a user: arguments from the command line, a Trainer, and nothing about processes.
SCRIPT = """
import json, os, sys
from tests.support.toys import Classifier, classification_rows
from trainer_lib import ArgumentParser, Trainer, TrainingArguments

(args,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(Classifier(), args, train_dataset=classification_rows(16))
trainer.train()
comm, engine = trainer._trainflow.comm, trainer._trainflow.engine
seen = [comm.rank, comm.world_size, comm.local_rank, engine.strategy.name, engine.precision.name]
seen.append(trainer.args.fsdp or "")
line = "seen " + json.dumps([*seen, trainer.state.global_step]) + chr(10)
os.write(1, line.encode())  # at once: with python -u a print goes out in pieces, between those of the other process
"""
ARGUMENTS = ("--output_dir", "out", "--max_steps", "2", "--save_strategy", "no", "--use_cpu", "--disable_tqdm", "True")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run(folder: Path, *commands: Sequence[str], env: Sequence[dict[str, str]] = ({},)) -> list[list[Any]]:
    """Run the commands side by side; what each process saw, by rank."""
    base = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    started = [
        subprocess.Popen(
            list(command),
            cwd=folder,
            env={**base, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, more in zip(commands, env, strict=True)
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)
    # A launcher may write both processes' lines into one.
    found = [part for text in said for part in text.split("seen ")[1:]]
    return sorted(json.JSONDecoder().raw_decode(part)[0] for part in found)


def on_both(strategy: str = "ddp", precision: str = "fp32", fsdp: str = "") -> list[list[Any]]:
    return [[rank, 2, rank, strategy, precision, fsdp, 2] for rank in (0, 1)]


def test_torchrun_and_the_launcher_of_old(script: Path) -> None:
    """`python -m torch.distributed.launch` tells the script its rank as an argument as well."""
    log = ("--log-dir", str(script / "logs"))
    new = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *log]
    assert run(script, [*new, "script.py", *ARGUMENTS]) == on_both()
    old = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "2", *log]
    assert run(script, [*old, "--master-port", str(port()), "script.py", *ARGUMENTS]) == on_both()


FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 10
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""


def test_accelerate_launch_with_a_configuration_file(script: Path) -> None:
    (script / "fsdp.yaml").write_text(FSDP)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml"]
    command += ["--main_process_port", str(port()), "--log_dir", str(script / "logs"), "script.py", *ARGUMENTS]
    assert run(script, command) == on_both("fsdp", "bf16", "full_shard auto_wrap")


def test_tasks_of_slurm(script: Path) -> None:
    """What srun sets for two tasks on one machine, MASTER_ADDR not being among it."""
    job = {"SLURM_JOB_ID": str(port()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    where = {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    env = [{**job, **where, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
    command = [sys.executable, "script.py", *ARGUMENTS]
    assert run(script, command, command, env=env) == on_both()


def test_pods_of_an_indexed_job(script: Path) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port())}
    env = [{**job, "JOB_COMPLETION_INDEX": str(rank)} for rank in (0, 1)]
    command = [sys.executable, "script.py", *ARGUMENTS]
    seen = run(script, command, command, env=env)
    assert [each[:3] for each in seen] == [[0, 2, 0], [1, 2, 0]]  # a pod has devices of its own: local rank 0


@pytest.mark.needs("deepspeed")
def test_the_deepspeed_launcher(script: Path) -> None:
    """It tells the script its rank as an argument; DeepSpeed itself need not be used."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port())]
    assert run(script, [*command, "script.py", *ARGUMENTS]) == on_both()
