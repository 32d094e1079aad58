"""Launching one request: who starts its ranks, and what comes back.

Every launcher does the same: it runs ``python -m trainer_lib.worker <verb> <run dir>`` for each rank and gives the
result file back, or raises the failure of the first rank that failed. They differ in who starts the ranks:

    process      one worker, no distributed runtime
    torchrun     N workers through torch's elastic agent; on several machines each has one (`launch.nodes`)
    accelerate   N workers on this machine through `accelerate launch`
    deepspeed    N workers on this machine through the `deepspeed` launcher
    in_process   the calling process itself (notebooks, ``memory://``); nothing shields the caller from it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer_lib.errors import InfrastructureError
from trainer_lib.launch import accelerate, deepspeed, in_process, nodes, process, torchrun
from trainer_lib.launch.config import LaunchConfig, check_rendezvous, resolve_config
from trainer_lib.launch.failures import find_failure
from trainer_lib.launch.run_dir import MARK, RunDir
from trainer_lib.launch.supervise import Listener, Supervisor
from trainer_lib.launch.variables import free_port, single_process, worker_environment
from trainer_lib.requests import Request

R = TypeVar("R")


def launch(
    request: Request[R],
    config: LaunchConfig,
    *,
    env: Mapping[str, str],
    on_line: Callable[[str], None],
    on_event: Callable[[dict[str, Any]], None],
    should_cancel: Callable[[], bool] | None = None,
) -> R:
    """Run one request in processes of its own and return its result. Blocks; callbacks come in the calling thread.

    Whatever ends this call (a result, a failure, Ctrl-C, any exception of a callback) also ends every process that it
    started: first SIGTERM, upon which workers agree on a step, save and leave, then after `grace_s` SIGKILL. When the
    caller itself is killed, the guard does the same.

    Args:
        request: see `trainer_lib.requests`; goes into a private file (and to the other machines, if there are any), and
            must hold no secret.
        env: variables for the workers over `config.env`; secrets belong here.
        on_line: called with each line the workers print.
        on_event: called with each progress event (step, loss, …).
        should_cancel: polled; once true, the workers are stopped gracefully and `Interrupted` is raised.

    Raises:
        TrainflowError: the typed failure of the first rank that failed.
    """
    config = resolve_config(config, use_cpu=request.use_cpu)
    listener = Listener(on_line, on_event, should_cancel or (lambda: False))
    restarts = 0
    while True:
        run_dir = RunDir.create(request.to_json(), config.grace_s, listener.should_cancel)
        try:
            return _attempt(request, config, run_dir, env, listener)
        except InfrastructureError as error:
            if restarts >= config.max_restarts or listener.should_cancel():
                raise
            restarts += 1
            message = f"{error.message} Starting again ({restarts} of {config.max_restarts})."
            on_event({"event": "warning", "message": message})
        finally:
            if request.debug:
                run_dir.keep()
                on_line(f"run files kept for debugging: {run_dir.path}")
            else:
                run_dir.remove()


def _attempt(
    request: Request[R], config: LaunchConfig, run_dir: RunDir, env: Mapping[str, str], listener: Listener
) -> R:
    if config.kind == "in_process":
        return in_process.run_request(request, run_dir, {**config.env, **env, **single_process()}, listener.on_event)
    environment = {**worker_environment(config, env), MARK: str(run_dir.path)}
    command = _command(request.verb, config, run_dir, environment)
    ending = Supervisor(command, environment, run_dir, config.grace_s, config.timeout_s, listener).run_command()
    result = run_dir.read_json("result.json")
    # Rank 0 writes the result after everything is on the store: what happens to a process after that changes nothing.
    if result is not None and not run_dir.read_errors():
        return request.read_result(result)
    raise find_failure(run_dir, ending, direct=config.kind == "process")


def _command(verb: str, config: LaunchConfig, run_dir: RunDir, environment: Mapping[str, str]) -> list[str]:
    processes, path = int(config.processes), run_dir.path
    if config.several_nodes:
        check_rendezvous(config)
        nodes.write_settings(run_dir, config)
        return nodes.build_command(path)
    if config.kind == "torchrun":
        return torchrun.build_command(verb, path, processes)
    if config.kind == "accelerate":
        threads = environment["OMP_NUM_THREADS"]
        return accelerate.build_command(verb, path, processes, threads, config.config_file, free_port())
    if config.kind == "deepspeed":
        return deepspeed.build_command(verb, path, processes, free_port(), environment)
    return process.build_command(verb, path)
