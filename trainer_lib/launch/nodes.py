"""Several machines: one leads, the others follow. Imports no torch; `trainer_lib.machines.rendezvous` joins them.

::

    trainflow run  -> launch -> guard -> node agent ==== TCP ==== node agent <- guard <- follow  <- trainflow join
    (the leading machine)                  |    rendezvous          |                              (every other one)
                                        workers <== collectives ==> workers

The leading machine runs the pipeline. It opens a store at the rendezvous address for the duration of a launch and
puts the request there. A following machine waits for such a store, reads the request and starts its workers. Then it
waits for the next launch (the leading machine starts again after it lost a worker), until it reads that all is done.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from trainer_lib.errors import ConfigError, InfrastructureError, Interrupted, from_record
from trainer_lib.launch.run_dir import MARK, RunDir, write_settings
from trainer_lib.launch.settings.config import LaunchConfig, check_rendezvous, resolve_config
from trainer_lib.launch.settings.variables import worker_environment
from trainer_lib.launch.supervise import Ending, Listener, Supervisor, start_guard

NOTHING = "nothing"  # the verb of a launch that only dismisses the waiting machines
AGENT = (sys.executable, "-P", "-u", "-m", "trainer_lib.machines.agent")


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
    config = dataclasses.replace(config, nodes=nodes, node_rank=config.node_rank or None, threads=asked)
    # The number of workers is resolved later: the request states whether they use the CPU.
    checked = resolve_config(dataclasses.replace(config, processes=1))
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


def dismiss(config: LaunchConfig) -> None:
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
        start = partial(start_guard, [*AGENT, str(run_dir.path)], environment, run_dir, grace_s)
        ending = Supervisor(start, run_dir, grace_s, None, listener).run_command()
        return ending, run_dir.read_json("outcome.json")
    finally:
        run_dir.remove()
