"""`python script.py` under everything that may start it: the same script, unchanged, trains on all its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import free_port
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
line = "seen " + json.dumps([*seen, trainer.args.fsdp or "", trainer.state.global_step]) + chr(10)
os.write(1, line.encode())  # at once: with python -u a print goes out in pieces, between those of the other process
"""
ARGUMENTS = ("--output_dir", "out", "--max_steps", "2", "--save_strategy", "no", "--use_cpu", "--disable_tqdm", "True")
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
# The launcher and its words; the last of these has the port.
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--log-dir", "logs", "--master-port"],
    # It tells the script its rank as an argument, as DeepSpeed's does.
    "of old": ["torch.distributed.launch", "--nproc-per-node", "2", "--log-dir", "logs", "--master-port"],
    "accelerate": [
        *("accelerate.commands.launch", "--config_file", "fsdp.yaml", "--log_dir", "logs", "--main_process_port")
    ],
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port"],
}
# What srun sets for two tasks on one machine, and Kubernetes for the pods of an indexed job.
SLURM = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
SLURM |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}


def run(folder: Path, *started: tuple[list[str], dict[str, str]]) -> list[list[Any]]:
    """Run commands side by side, each with its variables; what each process saw, by rank."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "fsdp.yaml").write_text(FSDP)
    base = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [
        subprocess.Popen([sys.executable, *words, *ARGUMENTS], cwd=folder, env={**base, **more}, text=True, **streams)
        for words, more in started
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    # A launcher may write both processes' lines into one.
    parts = [part for text in said for part in text.split("seen ")[1:]]
    return sorted(json.JSONDecoder().raw_decode(part)[0] for part in parts)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.needs("deepspeed") if name == "deepspeed" else ()) for name in LAUNCHERS],
)
def test_a_script_trains_under_every_launcher(name: str, tmp_path: Path) -> None:
    seen = run(tmp_path, (["-m", *LAUNCHERS[name], str(free_port()), "script.py"], {}))
    way = ["fsdp", "bf16", "full_shard auto_wrap"] if name == "accelerate" else ["ddp", "fp32", ""]
    assert seen == [[rank, 2, rank, *way, 2] for rank in (0, 1)]


@pytest.mark.parametrize("scheduler", ["slurm", "indexed job"])
def test_a_script_trains_as_the_tasks_of_a_scheduler(scheduler: str, tmp_path: Path) -> None:
    port = str(free_port())
    if scheduler == "slurm":  # MASTER_ADDR is not among what it sets
        tasks = [{**SLURM, "SLURM_JOB_ID": port, "SLURM_PROCID": each, "SLURM_LOCALID": each} for each in "01"]
    else:
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        tasks = [{**job, "JOB_COMPLETION_INDEX": each} for each in "01"]
    seen = run(tmp_path, *((["script.py"], task) for task in tasks))
    # A pod has devices of its own: local rank 0.
    assert [each[:3] for each in seen] == [[0, 2, 0], [1, 2, 1 if scheduler == "slurm" else 0]]
    assert [each[3:] for each in seen] == [["ddp", "fp32", "", 2]] * 2
