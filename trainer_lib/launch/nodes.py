"""Several machines: one leads, the others follow. Torch-free; what meets whom is `trainer_lib.machines.rendezvous`.

::

    trainflow run  -> launch -> guard -> node agent ==== TCP ==== node agent <- guard <- follow  <- trainflow join
    (the leading machine)                  |    rendezvous          |                              (every other one)
                                        workers <== collectives ==> workers

The leading machine runs the pipeline. It opens a store at the rendezvous address for as long as a launch lasts and
puts the request into it. A following machine waits for such a store, takes the request, starts its workers, and waits
for the next launch (the leading machine starts again after a lost worker) until it reads that all is done.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_lib.errors import ConfigError, InfrastructureError, Interrupted, from_record
from trainer_lib.launch.config import LaunchConfig, check_rendezvous, from_settings, resolve_config
from trainer_lib.launch.run_dir import MARK, RunDir
from trainer_lib.launch.supervise import Listener, Supervisor
from trainer_lib.launch.variables import worker_environment

SETTINGS = "launch.json"
NOTHING = "nothing"  # the verb of a launch that only tells the others so


def build_command(run_dir: Path) -> list[str]:
    """The command line of a machine's agent; whether it leads is among the settings."""
    return [sys.executable, "-u", "-m", "trainer_lib.machines.node", str(run_dir)]


def write_settings(run_dir: RunDir, config: LaunchConfig) -> None:
    """Leave the settings where the agent finds them."""
    run_dir.write_json(SETTINGS, dataclasses.asdict(config))


def follow(
    config: LaunchConfig,
    *,
    on_line: Callable[[str], None],
    should_cancel: Callable[[], bool] | None = None,
) -> None:
    """Take part in what the leading machine launches, until it says that all is done. Blocks.

    Args:
        config: `rendezvous` is needed, `node_rank` is not (machines are then numbered as they come); whatever else is
            unset follows this machine.
        on_line: called with each line that this machine's workers print.
        should_cancel: polled; once true, this machine's workers stop, and with them everybody's.

    Raises:
        ConfigError: no rendezvous, or bad settings.
        InfrastructureError: no machine leads there within `join_timeout_s`.
        TrainflowError: what ended the training, wherever it happened, when it is not tried again.
    """
    if config.rendezvous is None:
        raise ConfigError(
            "says not whom to follow.", field="train.launch.rendezvous", value="none", remedy="Give host:port."
        )
    nodes = config.nodes if config.several_nodes else "1:2"  # how many there are, the leading machine decides
    threads = {**os.environ, **config.env}.get("OMP_NUM_THREADS", "")
    asked = int(threads) if config.threads is None and threads.isdigit() else config.threads
    config = dataclasses.replace(config, nodes=nodes, node_rank=config.node_rank or None, threads=asked)
    # How many workers fit here is known once the request states whether they use the CPU.
    checked = resolve_config(dataclasses.replace(config, processes=1))
    listener = Listener(on_line, lambda event: None, should_cancel or (lambda: False))
    place = f"follow {config.rendezvous} as {config.node_rank} with {config.env.get('TRAINFLOW_LOCAL_RANK')}"
    run_dir = RunDir.create({"output": place, "follow": True}, config.grace_s, listener.should_cancel)
    try:
        write_settings(run_dir, config)
        environment = {**worker_environment(checked, {}), MARK: str(run_dir.path)}
        supervisor = Supervisor(build_command(run_dir.path), environment, run_dir, config.grace_s, None, listener)
        ending = supervisor.run_command()
        outcome = run_dir.read_json("outcome.json")
    finally:
        run_dir.remove()
    if ending.cancelled:
        raise Interrupted("Cancelled.", remedy="The same command takes part again.")
    if outcome is None:
        raise InfrastructureError(
            f"this machine's agent ended with exit code {ending.code}.",
            remedy="The same command takes part again; the last lines are in the details (--debug).",
            details=ending.tail,
        )
    if outcome["record"] is not None:
        raise from_record(outcome["record"])


def dismiss(config: LaunchConfig) -> None:
    """Tell the machines that wait at the rendezvous that there is nothing to do. Waits a few seconds for them."""
    if not config.several_nodes:
        return
    check_rendezvous(config)
    run_dir = RunDir.create({"output": f"dismiss {config.rendezvous}", "verb": NOTHING}, 0.0, lambda: False)
    try:
        write_settings(run_dir, config)
        environment = {**worker_environment(config, {}), MARK: str(run_dir.path)}
        listener = Listener(lambda line: None, lambda event: None, lambda: False)
        Supervisor(build_command(run_dir.path), environment, run_dir, 0.0, None, listener).run_command()
    finally:
        run_dir.remove()


def read_settings(path: Path) -> tuple[LaunchConfig, dict[str, Any]]:
    """The settings that `write_settings` left, and the request beside them."""
    run_dir = RunDir(path)
    config, request = run_dir.read_json(SETTINGS), run_dir.read_json("request.json")
    if config is None or request is None:
        raise ConfigError("holds no launch.", field="run dir", value=str(path), remedy="Start through trainflow.")
    return from_settings(config), request


def leads(request: dict[str, Any]) -> bool:
    """Whether the agent that finds this request in its run directory is the leading one."""
    return not request.get("follow")
