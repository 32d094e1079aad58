"""Launching one request: which launcher, how many processes, and what comes back.

Every launcher does the same: it runs ``python -m trainer_lib.worker <verb> <run dir>`` for each rank and gives the
result file back, or raises the failure of the first rank that failed. They differ in who starts the ranks:

    process      one worker, no distributed runtime
    torchrun     N workers on this machine, through torch's elastic agent
    in_process   the calling process itself (notebooks, ``memory://``); nothing shields the caller from it
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trainer_lib.errors import ConfigError, InfrastructureError
from trainer_lib.launch import in_process, process, torchrun
from trainer_lib.launch.devices import cores, devices
from trainer_lib.launch.failures import failure
from trainer_lib.launch.run_dir import MARK, RunDir
from trainer_lib.launch.supervise import Listener, Supervisor

Kind = Literal["auto", "torchrun", "process", "in_process", "accelerate"]
KINDS = ("auto", "torchrun", "process", "in_process")

# What an enclosing torchrun (a test, a notebook on a cluster) may have left in our environment.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class LaunchConfig:
    """How a verb's processes are started and ended.

    Attributes:
        kind: the launcher; "auto" is `process` for one process and `torchrun` for more.
        processes: how many workers; "auto" is one per CUDA device, or on a CPU two where there are two cores.
        threads: CPU threads per worker; None shares the cores out evenly (or respects OMP_NUM_THREADS when set). Fixed
            at start, so that the order of additions, and with it every bit of the result, does not depend on load.
        max_restarts: how often a launch that lost a worker is started again before its failure is reported.
        grace_s: seconds between SIGTERM and SIGKILL; a save has to fit into it.
        timeout_s: seconds without an event or a line of output after which the workers count as hung; None: never.
        env: variables for the workers, over those inherited.
    """

    kind: Kind = "auto"
    processes: int | Literal["auto"] = "auto"
    threads: int | None = None
    max_restarts: int = 0
    grace_s: float = 60.0
    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def check(config: LaunchConfig, *, use_cpu: bool = False) -> LaunchConfig:
    """The configuration with every "auto" resolved for this machine. Imports no torch, starts nothing.

    Args:
        use_cpu: the workers will use the CPU although there are devices.

    Raises:
        ConfigError: an unknown launcher, or more processes than this machine has cores (CPU) or devices.
    """
    if config.kind not in KINDS:
        remedy = f"Choose one of {', '.join(KINDS)}."
        raise ConfigError(
            "is not a launcher of this version.", field="train.launch.kind", value=config.kind, remedy=remedy
        )
    for name, least in (("processes", 1), ("threads", 1), ("max_restarts", 0), ("grace_s", 0), ("timeout_s", 0)):
        value = getattr(config, name)
        if isinstance(value, int | float) and value < least:
            raise ConfigError(
                f"must be at least {least}.",
                field=f"train.launch.{name}",
                value=value,
                remedy="Raise it, or leave it out.",
            )
    processes = _processes(config, use_cpu=use_cpu)
    kind = config.kind
    if kind == "auto":
        kind = "process" if processes == 1 else "torchrun"
    if processes > 1 and kind in ("process", "in_process"):
        raise ConfigError(
            f"the launcher '{kind}' runs one process.",
            field="train.launch.processes",
            value=processes,
            remedy="Set train.launch.kind=torchrun, or one process.",
        )
    return replace(config, kind=kind, processes=processes)


def _processes(config: LaunchConfig, *, use_cpu: bool) -> int:
    on_devices = 0 if use_cpu else devices({**os.environ, **config.env})
    if config.processes == "auto":
        if config.kind in ("process", "in_process"):
            return 1
        return on_devices or min(cores(), 2)
    if on_devices and config.processes > on_devices:
        raise ConfigError(
            f"this machine offers {on_devices} CUDA device(s), and a process needs one of its own.",
            field="train.launch.processes",
            value=config.processes,
            remedy=f"Use at most {on_devices}, or train on the CPU with train.args.use_cpu=true.",
        )
    if not on_devices and config.processes > cores():
        raise ConfigError(
            f"this process may use {cores()} CPU core(s); more workers than cores only wait for each other.",
            field="train.launch.processes",
            value=config.processes,
            remedy=f"Use at most {cores()}.",
        )
    return config.processes


def launch(
    request: dict[str, Any],
    config: LaunchConfig,
    *,
    env: Mapping[str, str],
    on_line: Callable[[str], None],
    on_event: Callable[[dict[str, Any]], None],
    should_cancel: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Run one request in processes of its own and return its result. Blocks; callbacks come in the calling thread.

    Whatever ends this call (a result, a failure, Ctrl-C, any exception of a callback) also ends every process that it
    started: first SIGTERM, upon which workers agree on a step, save and leave, then after `grace_s` SIGKILL. When the
    caller itself is killed, the guard does the same.

    Args:
        request: what `trainer_lib.worker` reads; goes into a private file and must hold no secret.
        env: variables for the workers over `config.env`; secrets belong here.
        on_line: called with each line the workers print.
        on_event: called with each progress event (step, loss, …).
        should_cancel: polled; once true, the workers are stopped gracefully and `Interrupted` is raised.

    Raises:
        TrainflowError: the typed failure of the first rank that failed.
    """
    use_cpu = str(request.get("args", {}).get("use_cpu", "")).lower() in ("true", "1", "yes")
    config = check(config, use_cpu=use_cpu)
    listener = Listener(on_line, on_event, should_cancel or (lambda: False))
    restarts = 0
    while True:
        run_dir = RunDir.create(request, config.grace_s, listener.should_cancel)
        try:
            return _attempt(request, config, run_dir, env, listener)
        except InfrastructureError as error:
            if restarts >= config.max_restarts or listener.should_cancel():
                raise
            restarts += 1
            message = f"{error.message} Starting again ({restarts} of {config.max_restarts})."
            on_event({"event": "warning", "message": message})
        finally:
            if request.get("debug"):
                run_dir.keep()
                on_line(f"run files kept for debugging: {run_dir.path}")
            else:
                run_dir.remove()


def _attempt(
    request: dict[str, Any], config: LaunchConfig, run_dir: RunDir, env: Mapping[str, str], listener: Listener
) -> dict[str, Any]:
    if config.kind == "in_process":
        return in_process.run(request, run_dir, {**config.env, **env}, listener.on_event)
    verb, processes = str(request["verb"]), int(config.processes)
    if config.kind == "torchrun":
        command = torchrun.command(verb, run_dir.path, processes)
    else:
        command = process.command(verb, run_dir.path)
    environment = {**worker_environment(config, env), MARK: str(run_dir.path)}
    ending = Supervisor(command, environment, run_dir, config.grace_s, config.timeout_s, listener).run()
    result = run_dir.read_json("result.json")
    # Rank 0 writes the result after everything is on the store: what happens to a process after that changes nothing.
    if result is not None and not run_dir.errors():
        return result
    raise failure(run_dir, ending, direct=config.kind == "process")


def worker_environment(config: LaunchConfig, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of the workers: ours, then `config.env`, then `env`, then what a launch has to fix."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    environment = {**kept, **config.env, **env}
    threads = config.threads or environment.get("OMP_NUM_THREADS") or max(1, cores() // int(config.processes))
    environment |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    environment["PYTHONSAFEPATH"] = "1"  # a folder in the working directory must not pass for a module of ours
    # torch's C++ side would advise every rank of every run against the search for unused parameters.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment["TRAINFLOW_GRACE_S"] = str(config.grace_s)
    if Path("/sys/class/net/lo").exists():  # one machine: collectives have no business on any other interface
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return environment
