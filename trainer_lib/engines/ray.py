"""Ray, its core only: a placement group with one bundle for each machine, and an agent actor in each.

An agent starts its machine's member under a guard, so that nothing of it outlives the agent. Agents and driver exchange
JSON text. Ray's own transport pickles calls; nothing that a member says is more than text in them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import counted
from trainer_lib.engines.base import Alive, Ended, Job, Lost, State, no_gpus_asked
from trainer_lib.engines.ray_agent import KILL_S, Agent
from trainer_lib.errors import ConfigError, InfrastructureError, OutOfMemoryError, Preempted, TrainflowError
from trainer_lib.launch.settings.config import unshared
from trainer_lib.launch.settings.variables import thread_variables
from trainer_lib.storage import Store

SMALLER_S = 10.0  # for a group that would be placed with fewer machines
CONNECT_S = 10.0
START_S = 30.0
ANSWER_S = 5.0  # for the answers of agents that are asked together
LOOK_S = 1.0  # between two looks at the machines that follow, and at those that are drained
SILENT_S = 15.0  # for an agent that does not answer while its machine counts as alive
WAIT_S = 0.2  # for what comes next, in one poll
_NAMES = {"cpus": "CPU", "gpus": "GPU"}
_NOT_IMPORTED = "failed to import on the worker"  # what Ray's stand-in for a class raises in every call


NO_CLUSTER = (RuntimeError, ValueError, OSError)  # what `join_cluster` raises where there is none to use


def join_cluster(address: str, **settings: Any) -> Any:
    """Make this process a driver of a cluster, and return the package; `settings` are further ones of ``ray.init``."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if address not in ("auto", "local"):
        host, _, port = address.rpartition(":")
        # Where nothing listens, Ray itself tries for six minutes.
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    ray = importlib.import_module("ray")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, configure_logging=False, namespace=uuid.uuid4().hex, **settings)
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise ConnectionError(_in_one_line(error)) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own would end this process
    return ray


class Ray:
    """One placement group of a Ray cluster."""

    outlives_driver = False
    restarts_workers = False

    def __init__(self) -> None:
        self._ray: Any = None
        self._marker: Path | None = None
        self._group: Any = None
        self._agents: list[Any] = []
        self._places: list[dict[str, Any]] = []
        self._leader: str | None = None
        self._told: set[int] = set()
        self._read = 0
        self._looked = float("-inf")
        self._silent: dict[int, float] = {}
        self._drained: str | None = None
        self._next: Callable[[], State] = self._wait_for_machines

    def place(self, job: Job) -> None:
        """Connect to the cluster; the group is asked for as soon as enough machines are there."""
        self._job = job
        self._marker = _marker(job)
        self._bundle = _bundle(job)
        self._since = time.monotonic()
        address = job.config.address or os.environ.get("RAY_ADDRESS") or "auto"
        try:
            self._ray = join_cluster(address)
        except NO_CLUSTER as error:
            versions = f"Ray {importlib.metadata.version('ray')} and Python {platform.python_version()}"
            what = f"The Ray cluster cannot be used from this machine: {_in_one_line(error)}."
            remedy = f"Run the command on a machine of a cluster that has {versions} everywhere, with its token."
            raise ConfigError(what, field="train.launch.address", value=address, remedy=remedy) from error

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the machines."""
        return tuple(place["host"] for place in self._places)

    def poll(self) -> tuple[list[str], State]:
        """Go on with what comes next, and read what the leading member has written."""
        try:
            state = self._next()
            if self._next != self._watch or isinstance(state, Lost):
                return [], state
            answer = self._call(0, "read", after=self._read)
        except self._ray.exceptions.RayError as error:
            return [], self._take(error)
        lines: list[str] = [] if answer is None else answer["lines"]
        self._read += len(lines)
        for line in lines:
            if line.startswith('{"started"'):  # where the leading member is, which the others have to know
                self._leader = str(parse_json(line)["started"])
                self._tell_leader()
        if answer is None or answer["code"] is None:
            return lines, state
        if self._drained is not None:
            return lines, Lost(self._preempted())
        return lines, Ended(int(answer["code"]), "\n".join(lines[-20:]))

    def end(self, *, now: bool) -> None:
        """Have the leading member save and end; with `now`, kill every member and free the group."""
        if now and self._marker is not None:
            self._marker.unlink(missing_ok=True)
        if self._ray is None or not self._ray.is_initialized():
            return
        if now or self._leader is None:
            self._next = lambda: Ended(1)
        if not now:
            with contextlib.suppress(self._ray.exceptions.RayError, IndexError):  # it may not have started yet
                self._call(0, "tell", word="stop")
            return
        alive = [agent for index, agent in enumerate(self._agents) if index not in self._silent]
        if alive:
            killed = [agent.tell.remote(json.dumps({"word": "kill"})) for agent in alive]
            self._ray.wait(killed, num_returns=len(killed), timeout=KILL_S)
        for agent in self._agents:
            self._ray.kill(agent)
        # Ray frees the group of a driver that leaves.
        self._ray.shutdown()

    def _wait_for_machines(self) -> State:
        """Ask for a group as soon as there are machines for it."""
        least, most = self._job.config.node_range
        asked = self._bundle.items()
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        fitting = [node for node in alive if all(node["Resources"].get(name, 0) >= amount for name, amount in asked)]
        with_gpus = [node for node in fitting if node["Resources"].get("GPU")]
        if with_gpus and "GPU" not in self._bundle and self._job.takes_gpus:
            return Lost(no_gpus_asked(len(with_gpus)))
        if len(fitting) < least:
            if time.monotonic() - self._since > self._job.config.join_timeout_s:
                return Lost(self._unplaceable(len(fitting)))
            return Alive(f"waits for machines: {self._offer(len(fitting))}")
        return self._ask_for(min(most, len(fitting)))

    def _ask_for(self, count: int) -> State:
        self._count, self._asked = count, time.monotonic()
        self._group = self._ray.util.placement_group([self._bundle] * count, strategy="STRICT_SPREAD")
        self._ready = self._group.ready()
        self._next = self._wait_for_group
        return Alive(f"waits for {count} machine(s) of the cluster")

    def _wait_for_group(self) -> State:
        if self._ray.wait([self._ready], timeout=WAIT_S)[0]:
            return self._start_agents()
        waited = time.monotonic() - self._asked
        if waited > SMALLER_S and self._count > self._job.config.node_range[0]:
            self._ray.util.remove_placement_group(self._group)
            return self._ask_for(self._count - 1)
        if time.monotonic() - self._since > self._job.config.join_timeout_s:
            return Lost(self._unplaceable(self._count))
        return Alive(f"waits for {self._count} machine(s) of the cluster, which are in use")

    def _start_agents(self) -> State:
        self._ray.get(self._ready)
        scheduling = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        extra = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU", "memory")}
        options = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0), "resources": extra}
        options |= {"memory": self._bundle.get("memory"), "max_restarts": 0, "max_concurrency": 4}
        actor = self._ray.remote(Agent)
        self._agents = [
            actor.options(**options, scheduling_strategy=scheduling(self._group, index)).remote()
            for index in range(self._count)
        ]
        path = None if self._marker is None else str(self._marker)
        self._described = [agent.describe.remote(json.dumps({"path": path})) for agent in self._agents]
        self._next = self._wait_for_agents
        return Alive(f"starts on {self._count} machine(s)")

    def _wait_for_agents(self) -> State:
        ready, _ = self._ray.wait(self._described, num_returns=self._count, timeout=WAIT_S)
        if len(ready) < self._count:
            return Alive(f"starts on {self._count} machine(s)")
        described = self._answers(dict(enumerate(self._described)), ANSWER_S)
        if len(described) < self._count:
            return Lost(self._lost(min(self._silent)))
        self._places = [described[index] for index in range(self._count)]
        for place in self._places:
            if not place["seen"]:
                return Lost(unshared(place["host"], self._job.output))
        # All at once: the others load while the leading one does, and wait for its address.
        started = self._answers({index: self._start(index) for index in range(self._count)}, START_S)
        if len(started) < self._count:
            return Lost(self._lost(min(self._silent)))
        self._next = self._watch
        return Alive(f"runs on {', '.join(self.addresses())}")

    def _start(self, index: int) -> Any:
        env = {**self._job.env, "PYTHONSAFEPATH": "1"}
        place = {"leads": index == 0, "host": self._places[index]["host"], "nodes": self._count}
        asked = {"job": self._job.to_text(), "env": env, "without": list(thread_variables("")), **place}
        return self._agents[index].start.remote(json.dumps(asked))

    def _tell_leader(self) -> None:
        untold = [index for index in range(1, self._count) if index not in self._told]
        self._told |= set(self._call_all(untold, "lead", leader=self._leader))

    def _watch(self) -> State:
        """Look whether every machine is alive and none is drained."""
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            self._call_all(range(1, self._count), "read", after=0)  # it keeps no lines; an answer is a sign of life
            if self._leader is not None:
                self._tell_leader()
            if self._drained is None:  # Ray offers this list to its own libraries
                drained = importlib.import_module("ray._private.state").state.get_draining_nodes()
                self._drained = next((place["host"] for place in self._places if place["node"] in drained), None)
                if self._drained is not None:  # the workers save before their machine is taken away
                    self._call(0, "tell", word="stop")
        dead = {node["NodeID"] for node in self._ray.nodes() if not node["Alive"]} if self._silent else set()
        for index, since in self._silent.items():
            if self._places[index]["node"] in dead or time.monotonic() - since > SILENT_S:
                return Lost(self._lost(index))
        return Alive(f"runs on {', '.join(self.addresses())}")

    def _call(self, index: int, method: str, **fields: Any) -> Any:
        """Call an agent; None when it does not answer, which is not yet a death."""
        return self._call_all([index], method, **fields).get(index)

    def _call_all(self, indices: Iterable[int], method: str, **fields: Any) -> dict[int, Any]:
        text = json.dumps(fields)
        return self._answers({index: getattr(self._agents[index], method).remote(text) for index in indices}, ANSWER_S)

    def _answers(self, calls: Mapping[int, Any], timeout: float) -> dict[int, Any]:
        """Wait for the answers of several agents; one without an answer counts as silent from the call on."""
        if not calls:
            return {}
        asked, answers = time.monotonic(), {}
        ready, _ = self._ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout)
        for index, call in calls.items():
            try:
                answers[index] = parse_json(self._ray.get(call, timeout=ANSWER_S if call in ready else 0))
            except (self._ray.exceptions.ActorUnavailableError, self._ray.exceptions.GetTimeoutError):
                self._silent.setdefault(index, asked)
            except self._ray.exceptions.RayActorError as error:
                error.trainflow_index = index
                raise
            else:
                self._silent.pop(index, None)
        return answers

    def _take(self, error: Any) -> State:
        known, reason = self._ray.exceptions, _in_one_line(error)
        if isinstance(error, known.OutOfMemoryError) or ("memory" in reason.lower() and "OOM" in str(error)):
            remedy = "Ask for more (engine_options.memory), or lower per_device_train_batch_size."
            return Lost(OutOfMemoryError(f"Ray ended an agent for lack of memory: {reason}.", remedy=remedy))
        if isinstance(error, known.RuntimeEnvSetupError):
            remedy = "Correct the runtime environment of the cluster's job."
            return Lost(ConfigError(f"Ray could not make the runtime environment: {reason}.", remedy=remedy))
        if getattr(error, "actor_init_failed", False) or _NOT_IMPORTED in str(error):
            last = str(error).strip().splitlines()[-1].strip().rstrip(".")
            what = f"A machine of the cluster cannot load trainflow's agent: {last}."
            remedy = "Install the same trainflow, with its extra ray, on every machine of the cluster."
            field = "train.launch.engine"
            return Lost(ConfigError(what, field=field, value="ray", remedy=remedy, details=str(error)))
        if self._drained is not None or getattr(error, "preempted", False):
            return Lost(self._preempted())
        if isinstance(error, known.RayActorError | known.NodeDiedError):
            return Lost(self._lost(getattr(error, "trainflow_index", None)))
        what, remedy = f"Ray failed: {reason}.", "The same command continues."
        return Lost(InfrastructureError(what, remedy=remedy, details=str(error)))

    def _lost(self, index: int | None) -> TrainflowError:
        host = "of an agent" if index is None or not self._places else self._places[index]["host"]
        what = f"The machine {host} was lost: its agent does not answer."
        remedy = "The same command continues from the last save, on the machines that are left."
        return InfrastructureError(what, field="train.launch.nodes", remedy=remedy)

    def _preempted(self) -> TrainflowError:
        where = "a machine" if self._drained is None else f"the machine {self._drained}"
        return Preempted(f"The cluster took {where} back.", remedy="The same command continues.")

    def _offer(self, fitting: int) -> str:
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        names = ", ".join(f"{name} {amount:g}" for name, amount in self._bundle.items())
        total = {name: sum(node["Resources"].get(name, 0) for node in alive) for name in self._bundle}
        offered = ", ".join(f"{name} {amount:g}" for name, amount in total.items())
        return (
            f"the cluster offers {offered} on {counted(len(alive), 'machine')}, of which {fitting} have {names}; "
            f"{self._job.config.node_range[0]} with that were asked for"
        )

    def _unplaceable(self, fitting: int) -> ConfigError:
        return ConfigError(
            f"The machines could not be placed within {self._job.config.join_timeout_s:.0f} s: {self._offer(fitting)}.",
            field="train.launch.nodes",
            value=self._job.config.nodes,
            remedy="Ask for less (nodes, processes, engine_options), or add machines to the cluster.",
        )


def _bundle(job: Job) -> dict[str, float]:
    """Return what is asked of each machine, by Ray's names."""
    config = job.config
    asked = {_NAMES.get(name, name): float(amount) for name, amount in config.engine_options.items()}
    # One CPU for each thread, unless the options say otherwise.
    return {"CPU": float(int(config.processes) * (config.threads or 1)), **asked}


def _marker(job: Job) -> Path | None:
    """Write a file that every machine has to see; None where the output is not a folder."""
    store = Store.open(job.output)
    if not store.is_local:
        return None
    folder = store.local_path() / "attempts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seen-{uuid.uuid4().hex[:12]}"
    path.touch()
    return path


def _in_one_line(error: Any) -> str:
    """Return what an error of Ray says; the lines after its first have the cause."""
    return " ".join(str(getattr(error, "cause", None) or error).split())[:300].rstrip(".: ") or type(error).__name__
