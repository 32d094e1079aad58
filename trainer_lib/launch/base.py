"""Launch one request: start its ranks, and return its result.

Every launcher runs ``python -m trainer_lib.worker <verb> <run dir>`` for every rank and returns the result that rank 0
wrote, or raises the failure of the first rank that failed. Launchers differ in what starts the ranks:

    process      one worker, no distributed runtime
    torchrun     N workers through torch's elastic agent; on several machines, one agent on each (`follow`)
    accelerate   N workers on this machine through `accelerate launch`
    deepspeed    N workers on this machine through the `deepspeed` launcher
    in_process   the calling process itself (notebooks, ``memory://``); a crash of the work ends the caller

With `engine` set, all of this happens on the machines of a cluster, which the engine places (`trainer_lib.engines`).

Of several machines, one leads and the others follow it. The leading machine runs the pipeline: for the duration of a
launch it opens a store at the rendezvous address, and puts the request there (`trainer_lib.machines.rendezvous`). A
following machine waits for such a store, reads the request and starts its workers. Then it waits for the next launch
(the leading machine starts again after it lost a worker), until it reads that all is done::

    trainflow run  -> launch -> guard -> node agent ==== TCP ==== node agent <- guard <- follow  <- trainflow join
    (the leading machine)                  |    rendezvous          |                              (every other one)
                                        workers <== collectives ==> workers

Launches of one machine and user use a device at a time: the others wait.

    ~/.local/state/trainflow/devices/<machine>/GPU 0.0     locked by a launch that uses the device, and says which it is

A launch locks such a file (flock) for each of its devices, one after the other in the order of their names; the
processes that it starts inherit the open files. So the kernel frees a device when the last of them has ended, however
that was, and not before.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainer_lib.arguments.environment import ALONE
from trainer_lib.base.paths import state_folder
from trainer_lib.base.restore_process import variables_kept
from trainer_lib.errors import ConfigError, HangError, InfrastructureError, Interrupted, from_record
from trainer_lib.guard import OWNER, start_time
from trainer_lib.launch import warm
from trainer_lib.launch.failures import find_failure
from trainer_lib.launch.run_dir import MARK, NOTHING, RunDir, write_settings
from trainer_lib.launch.settings import accelerate
from trainer_lib.launch.settings.config import LaunchConfig, check_rendezvous, refused, require_torch, resolve_config
from trainer_lib.launch.settings.gpu_selection import list_visible, selection_variables
from trainer_lib.launch.settings.variables import engine_environment, free_port, worker_environment
from trainer_lib.launch.supervise import STACKS_S, Ending, Listener, Supervisor, start_guard
from trainer_lib.locks.file_lock import try_lock
from trainer_lib.protocol.requests import Request

_PYTHON = (sys.executable, "-P", "-u", "-m")
_AGENT = (*_PYTHON, "trainer_lib.machines.agent")
# One thread may launch within a launch; those of several threads (tasks that a flow submits) would mix their variables.
_turn = threading.RLock()

R = TypeVar("R")

ENGINE_END_S = 30.0
"""Seconds that an engine has to end what it has placed, beyond those that workers have to save."""
NODES_STACKS_S = 5.0  # for the stacks of workers of other machines, which are asked over the network
SAY_S = 60.0  # between two messages about one wait
POLL_S = 0.2
CPU = "the CPU"
_LIMIT = 4096


@contextlib.contextmanager
def held_devices(config: LaunchConfig, listener: Listener, *, on_devices: bool, what: str) -> Iterator[tuple[int, ...]]:
    """Wait until the devices of a launch are free for it, and hold them inside the block; others see `what` it does.

    Yields open files that the processes of the launch have to inherit: the devices are held until the last one has
    ended. Raises ConfigError where a limit was given and cannot be kept, and Interrupted where the launch was
    cancelled.
    """
    variables = {**os.environ, **config.env, **selection_variables(config.devices, config.device_order)}
    # The queue of an engine decides on its machines.
    gpus = list_visible(variables)[: int(config.processes)] if on_devices and config.engine is None else []
    limit = config.per_device or (1 if gpus else "any")
    files = []
    with contextlib.ExitStack() as opened:
        if limit != "any":
            try:
                folder = state_folder("devices") / socket.gethostname()
                folder.mkdir(mode=0o700, exist_ok=True)
                # In one order, so that no two launches wait for each other.
                for device in [f"GPU {name}" for name in sorted(gpus)] or [CPU]:
                    paths = [folder / f"{device.replace('/', '-')}.{number}" for number in range(limit)]
                    places = [os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in paths]
                    for file in places:
                        opened.callback(os.close, file)
                    files += _lock_one(places, device, what, listener)
            except OSError as error:
                reason = f"{error.strerror or error} ({error.filename})" if error.filename else str(error)
                message = f"It cannot be seen which launches use this machine's devices: {reason}."
                if config.per_device is not None:
                    remedy = "Make that folder writable, name another one in XDG_STATE_HOME, or leave the setting out."
                    raise refused("per_device", config.per_device, message, remedy) from error
                listener.on_event({"event": "warning", "message": f"{message} This one starts next to them."})
        yield tuple(files)


def _lock_one(places: Sequence[int], device: str, what: str, listener: Listener) -> list[int]:
    """Wait for one of the open files of a device; lock and return it, or none where our own launch uses the device."""
    ours = f"{os.getpid()}:{start_time(os.getpid())} "
    text = f"{ours}{what} (process {os.getpid()}), since {datetime.now(UTC):%H:%M} UTC".encode()
    began, said = time.monotonic(), float("-inf")
    while True:
        user = ""
        for file in places:
            if try_lock(file):
                os.ftruncate(file, 0)
                os.pwrite(file, text, 0)
                if said > 0:
                    free = f"{device[0].upper()}{device[1:]} can be used."
                    listener.on_event({"event": "wait", "message": free, "waited_s": time.monotonic() - began})
                return [file]
            user = os.pread(file, _LIMIT, 0).decode(errors="replace")
            # A worker that launches something uses the devices of the launch that it belongs to.
            if OWNER in os.environ and user.startswith(f"{os.environ[OWNER]} "):
                return []
        if listener.should_cancel():
            raise Interrupted(f"Cancelled while it waited for {device}.", remedy="The same command continues.")
        if time.monotonic() - said >= SAY_S:
            said = time.monotonic()
            listener.on_event({"event": "wait", "message": f"waits for {device}, in use by {user.partition(' ')[2]}"})
        time.sleep(POLL_S)


def launch(
    request: Request[R],
    config: LaunchConfig,
    *,
    env: Mapping[str, str],
    on_line: Callable[[str], None],
    on_event: Callable[[dict[str, Any]], None],
    should_cancel: Callable[[], bool] | None = None,
    what: str | None = None,
    shared: bool = False,
) -> R:
    """Run one request in separate processes and return its result. Blocks, and calls back in the calling thread.

    Whatever ends this call, Ctrl-C or an error of a callback included, also ends all of its processes: SIGTERM, on
    which the workers agree on a step, save and exit; SIGKILL after `grace_s`. If the caller is killed, the guard does.

    Args:
        request: what to do. It is written to a private file and sent to other machines: it must not hold a secret.
        env: variables for the workers, which override `config.env`; secrets belong here.
        on_line, on_event: called with the lines that the workers print, and with progress events (step, loss, …).
        should_cancel: polled; once it returns true, the workers are stopped gracefully and `Interrupted` is raised.
        what: what the launch does, for those that wait for its devices; None: its verb.
        shared: other launches may work on this output at the same time (`locks.shared_parts`).

    Raises:
        TrainflowError: the typed failure of the first rank that failed.
    """
    config = resolve_config(config, use_cpu=request.use_cpu)
    restarts, hung_at = 0, -2

    def pass_on(event: dict[str, Any]) -> None:
        nonlocal restarts
        restarts += int("restart" in event)  # of the leading machine of an engine
        on_event(event)

    listener = Listener(on_line, pass_on, should_cancel or (lambda: False))
    while True:
        try:
            left = replace(config, max_restarts=max(0, config.max_restarts - restarts))
            return _attempt(request, left, env, listener, what or request.verb, shared=shared)
        except InfrastructureError as error:
            # Only for failures of the surroundings: a mistake in the code or the data would repeat, as does a hang that
            # got no further than the one before.
            step = -1 if error.step is None else error.step
            is_hang = isinstance(error, HangError)
            if restarts >= config.max_restarts or (is_hang and step <= hung_at) or listener.should_cancel():
                raise
            restarts, hung_at = restarts + 1, step if is_hang else hung_at
            message = f"{error.message} Starting again ({restarts} of {config.max_restarts})."
            on_event({"event": "warning", "message": message, "restart": restarts})


def _put_away(run_dir: RunDir, on_line: Callable[[str], None], *, debug: bool) -> None:
    if debug:
        run_dir.keep()
        on_line(f"The run files are kept for debugging: {run_dir.path}")
    else:
        run_dir.close()


def _attempt(
    request: Request[R], config: LaunchConfig, env: Mapping[str, str], listener: Listener, what: str, *, shared: bool
) -> R:
    """Wait for the devices, once the processes that an earlier launch of this output left behind have ended; launch."""
    environment = (worker_environment if config.engine is None else engine_environment)(config, env)
    worker = warm.take(request.verb, config, environment)
    with contextlib.ExitStack() as stack:
        if worker is not None:
            stack.callback(worker.close)
        run_dir = RunDir.create(
            request.to_json(),
            config.grace_s,
            listener.should_cancel,
            shared=shared,
            engine=config.engine,
            made=None if worker is None else worker.run_dir,
        )
        stack.callback(_put_away, run_dir, listener.on_line, debug=request.debug)
        if config.engine is None:
            require_torch()
        on_devices = request.uses_devices and not request.use_cpu
        held = stack.enter_context(held_devices(config, listener, on_devices=on_devices, what=what))
        # The ranks of an enclosing job must not reach it: it is a world of one.
        if config.kind == "in_process":
            own = {**config.env, **env, **ALONE.variables()}
            return run_here(request, run_dir, own, listener.on_event)
        environment |= warm.launch_variables(run_dir)
        # Of the variables that the workers of an engine need, the names: values may be secrets.
        write_settings(run_dir, config, variables=sorted({*config.env, *env}), shared=shared)
        command = _command(request.verb, config, run_dir, environment)
        grace_s, timeout_s = config.grace_s, config.timeout_s
        if config.engine is not None:
            # The leading machine watches its workers; ending a job takes longer than ending a process.
            grace_s, timeout_s = config.grace_s + ENGINE_END_S, None

        def start() -> subprocess.Popen[bytes]:
            begun = None if worker is None else worker.begin(environment, held)
            return begun or start_guard(command, environment, run_dir, grace_s, held)

        stacks_s = NODES_STACKS_S if config.several_nodes else STACKS_S
        ending = Supervisor(start, run_dir, grace_s, timeout_s, listener, stacks_s=stacks_s).run_command()
        result = run_dir.read_json("result.json")
        # Rank 0 writes the result once everything is on the store, so a process that dies later does not matter.
        if result is not None and not run_dir.read_errors():
            return request.read_result(result)
        raise find_failure(run_dir, ending, direct=config.is_one_process)


def run_here(
    request: Request[R], run_dir: RunDir, env: Mapping[str, str], on_event: Callable[[dict[str, Any]], None]
) -> R:
    """Carry out the request in this process and return its result. Output goes where this process prints.

    Threads take turns: the process has one environment, random state and default device. Raises TrainflowError.
    """
    # Imported by name at the last moment: importing `launch` must not import the worker, and with it torch.
    worker = importlib.import_module("trainer_lib.worker.process.session")
    with _turn, variables_kept(env):
        result: R = worker.run_here(request, run_dir, on_event)
    return result


def _command(verb: str, config: LaunchConfig, run_dir: RunDir, environment: Mapping[str, str]) -> list[str]:
    processes, path = int(config.processes), run_dir.path
    if config.engine is not None:
        # It leaves in the folder what an agent leaves, so whatever ends a launch ends an engine's as well.
        return [*_PYTHON, "trainer_lib.engines.driver", str(path)]
    if config.several_nodes:
        check_rendezvous(config)
    if config.kind == "torchrun":
        return [*_AGENT, str(path)]
    if config.kind == "accelerate":
        threads = environment["OMP_NUM_THREADS"]
        options = accelerate.build_options(verb, path, processes, threads, config.config_file, free_port())
        return [*_AGENT, str(path), *options]
    if config.kind == "deepspeed":
        return _deepspeed_command(verb, path, processes, environment)
    if config.kind == "process":
        return warm.worker_command(verb, run_dir)
    remedy = "Resolve the configuration first (resolve_config): auto and environment become another launcher there."
    raise ConfigError("This launcher starts no command.", field="train.launch.kind", value=config.kind, remedy=remedy)


def _deepspeed_command(verb: str, run_dir: Path, processes: int, environment: Mapping[str, str]) -> list[str]:
    """Return the command line of DeepSpeed's runner, which is executed, never imported: that takes seconds."""
    # Given a number only, the runner takes the machine's first devices.
    visible = [part.strip() for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    which = ["--include", f"localhost:{','.join(visible[:processes])}"] if visible else ["--num_gpus", str(processes)]
    return [
        *(*_PYTHON, "deepspeed.launcher.runner", "--quiet", *which, "--no_local_rank"),
        *("--master_addr", "127.0.0.1", "--master_port", str(free_port())),
        *("--module", "trainer_lib.worker", verb, str(run_dir)),
    ]


def follow(
    config: LaunchConfig, *, on_line: Callable[[str], None], should_cancel: Callable[[], bool] | None = None
) -> None:
    """Join the training that another machine leads, until it is done. Blocks.

    Args:
        config: must hold `rendezvous`. Without `node_rank`, machines are numbered in the order of their arrival; any
            other unset field is resolved for this machine.
        on_line: called with the lines that this machine's workers print.
        should_cancel: polled; once it returns true, the workers of all machines stop.

    Raises:
        ConfigError: there is no rendezvous address, or a setting is wrong.
        InfrastructureError: no machine led there within `join_timeout_s`.
        TrainflowError: the failure that ended the training, on whichever machine it happened.
    """
    if config.rendezvous is None:
        what, field = "No leader address was given.", "train.launch.rendezvous"
        raise ConfigError(what, field=field, value="none", remedy="Give host:port.")
    nodes = config.nodes if config.several_nodes else "1:2"  # the leading machine decides how many take part
    threads = {**os.environ, **config.env}.get("OMP_NUM_THREADS", "")
    asked = int(threads) if config.threads is None and threads.isdigit() else config.threads
    config = replace(config, nodes=nodes, node_rank=config.node_rank or None, threads=asked)
    # The number of workers is resolved later: the request states whether they use the CPU.
    checked = resolve_config(replace(config, processes=1))
    listener = Listener(on_line, lambda event: None, should_cancel or (lambda: False))
    place = f"follow {config.rendezvous} as {config.node_rank} with {config.env.get('TRAINFLOW_LOCAL_RANK')}"
    ending, outcome = _run_agent({"output": place, "follow": True}, config, checked, config.grace_s, listener)
    if ending.cancelled:
        raise Interrupted("Cancelled.", remedy="The same command joins again.")
    if outcome is None:
        what = f"This machine's agent ended with exit code {ending.code}."
        remedy = "The same command joins again; the last lines are in the details (--debug)."
        raise InfrastructureError(what, remedy=remedy, details=ending.tail)
    if outcome["record"] is not None:
        raise from_record(outcome["record"])


def dismiss_followers(config: LaunchConfig) -> None:
    """Dismiss the machines that wait at the rendezvous, when there is nothing to do. Waits a few seconds for them."""
    if not config.several_nodes:
        return
    # The same check as before a launch, because the others wait at this address.
    check_rendezvous(config)
    request = {"output": f"dismiss {config.rendezvous}", "verb": NOTHING}
    _run_agent(request, config, config, 0.0, Listener(lambda line: None, lambda event: None, lambda: False))


def _run_agent(
    request: dict[str, Any], config: LaunchConfig, checked: LaunchConfig, grace_s: float, listener: Listener
) -> tuple[Ending, dict[str, Any] | None]:
    """Run this machine's agent to its end; return how it ended, and the outcome that it has read."""
    run_dir = RunDir.create(request, grace_s, listener.should_cancel)
    try:
        write_settings(run_dir, config)
        environment = {**worker_environment(checked, {}), MARK: str(run_dir.path)}
        start = partial(start_guard, [*_AGENT, str(run_dir.path)], environment, run_dir, grace_s)
        ending = Supervisor(start, run_dir, grace_s, None, listener).run_command()
        return ending, run_dir.read_json("outcome.json")
    finally:
        run_dir.remove()
