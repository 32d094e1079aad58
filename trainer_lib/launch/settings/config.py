"""The settings of a launch, and their check before any process starts. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from trainer_lib.arguments import environment
from trainer_lib.base.suggestions import counted
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.launch.settings.gpu_selection import check_selection, num_cores, num_devices, selection_variables

Kind = Literal["auto", "torchrun", "process", "in_process", "accelerate", "deepspeed", "environment"]
Engine = Literal["ray", "slurm"]
_LEAST = {
    **dict.fromkeys(("processes", "threads", "per_device"), 1),
    **dict.fromkeys(("max_restarts", "grace_s", "timeout_s", "join_timeout_s"), 0),
}
# What the engine decides, or what holds for one machine only.
_DECIDED = ("node_rank", "rendezvous", "devices", "device_order", "per_device", "config_file")
_PROGRAMS = ("sbatch", "squeue", "scancel")
# What we pass to sbatch ourselves, and where it is set instead.
_OURS = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "nodes and processes of the launch"),
    **dict.fromkeys(("job-name", "output", "error", "open-mode", "parsable", "wrap", "array", "wait"), "nothing"),
    **dict.fromkeys(("signal", "input", "export", "export-file", "chdir", "test-only"), "grace_s, env and the spec"),
}
_RESOURCE = re.compile(r"[A-Za-z_][\w:.-]*")


def _option(default: Any, description: str, **bounds: float) -> Any:
    """Define a field of `LaunchConfig`. Only pydantic reads this metadata, when it validates a spec."""
    return field(default=default, metadata={"description": description, **bounds})


@dataclass(frozen=True)
class _Rule:
    """A rule for the numbers, or the texts, that a field of several types takes, as pydantic reads it."""

    name: str
    value: int | str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), self.name: self.value}


@dataclass(frozen=True)
class LaunchConfig:
    """The launch of a verb's processes.

    A spec validates these settings through `trainflow.tasks.configs.LaunchSettings`, which derives from this class.
    pydantic is not imported here, because every worker imports this package.

    The number of threads is fixed at the start: with it, the order of additions, and so every bit of a result, does not
    depend on the machine's load. A save has to fit into `grace_s`.
    """

    kind: Kind = _option(
        "auto",
        "Launcher. auto: torchrun for several processes, one plain process otherwise. "
        "in_process runs the work inside the calling process (for tests and notebooks); environment joins what Slurm, "
        "Kubernetes, Kubeflow, SkyPilot, dstack, MPI or an enclosing torchrun has started, and is refused elsewhere.",
    )
    processes: Annotated[int, _Rule("ge", 1)] | Literal["auto"] = _option(
        "auto", "Worker processes on a machine; auto: one per GPU, or on a CPU two where there are two cores."
    )
    threads: Annotated[int, _Rule("ge", 1)] | None = _option(
        None, "CPU threads per process; unset: cores are shared out."
    )
    max_restarts: int = _option(0, "Restarts of lost workers before the stage fails.", ge=0)
    grace_s: float = _option(60.0, "Seconds from SIGTERM to SIGKILL when workers are stopped.", gt=0)
    timeout_s: float | None = _option(
        None, "Seconds without a sign of life after which workers count as hung; unset: never.", gt=0
    )
    env: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"description": "Extra environment variables of the workers. Never a secret: export those."},
    )
    devices: tuple[int | str, ...] | None = _option(
        None, "GPUs to use, in this order, as CUDA_VISIBLE_DEVICES names them; unset: all visible."
    )
    device_order: Literal["PCI_BUS_ID", "FASTEST_FIRST"] | None = _option(
        None, "How CUDA numbers the GPUs (CUDA_DEVICE_ORDER)."
    )
    per_device: Annotated[int, _Rule("ge", 1)] | Literal["any"] | None = _option(
        None,
        "Launches of this user that may use one device of this machine at a time; the others wait. unset: 1 on a GPU, "
        "any number on a CPU, which counts as one device.",
    )
    nodes: Annotated[int, _Rule("ge", 1)] | Annotated[str, _Rule("pattern", r"^\d+(:\d+)?$")] = _option(
        1, 'Machines that train together; "1:4" is at least one and at most four. Training only.'
    )
    node_rank: Annotated[int, _Rule("ge", 0)] | None = _option(
        None, "Which machine this is; 0 (or unset) leads and runs the pipeline, the others join."
    )
    rendezvous: str | None = _option(None, "host:port of the leading machine, where the others find it.")
    join_timeout_s: float = _option(600.0, "Seconds that the machines wait for each other.", gt=0)
    interface: str | None = _option(
        None, "Network interface of the workers' messages; unset: the one towards rendezvous."
    )
    config_file: str | None = _option(None, "Configuration file of `accelerate config`; kind accelerate only.")
    engine: Engine | None = _option(
        None,
        "What places the machines of a cluster and starts the work there: ray or slurm. unset: this machine, and those "
        "that join it.",
    )
    address: str | None = _option(
        None, "Ray: host:port of the cluster; unset: the cluster that this machine is part of (RAY_ADDRESS counts)."
    )
    engine_options: Mapping[str, bool | int | float | str] = field(
        default_factory=dict,
        metadata={
            "description": "Slurm: options of sbatch by their long names (partition, account, time), and folder. "
            "Ray: cpus, gpus, memory, and custom resources by name, per machine."
        },
    )

    # Set by `resolve_config` alone. It is not a field: a copy made by `replace` has to be checked again.
    _checked_for_cpu: ClassVar[bool | None] = None

    @property
    def node_range(self) -> tuple[int, int]:
        """The smallest and the largest number of machines."""
        # 2 is exactly two machines, "1:4" one to four.
        least, _, most = str(self.nodes).partition(":")
        return int(least), int(most or least)

    @property
    def is_one_process(self) -> bool:
        """Whether the launcher starts one worker only, without a distributed runtime."""
        return self.kind in ("process", "in_process")

    @property
    def several_nodes(self) -> bool:
        """Whether more than one machine may take part."""
        return self.node_range[1] > 1

    @property
    def follows(self) -> bool:
        """Whether this machine joins a training that another one leads."""
        return self.several_nodes and bool(self.node_rank)

    @property
    def world_size(self) -> int:
        """Number of processes on all machines, of a range the largest. `processes` must be a number by now."""
        return int(self.processes) * self.node_range[1]

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the rendezvous."""
        host, _, port = str(self.rendezvous).rpartition(":")
        return host.strip("[]"), int(port)


def resolve_config(config: LaunchConfig, *, use_cpu: bool = False) -> LaunchConfig:
    """Check the configuration, unless it was, and resolve every "auto" for this machine. Starts no process.

    Args:
        use_cpu: the workers will use the CPU although there are devices.

    Raises:
        ConfigError: an unknown launcher or one that is not installed; more processes than this machine has devices, or
            cores on a CPU; devices that do not exist; several machines without a rendezvous address.
    """
    if config._checked_for_cpu is use_cpu:
        return config
    if config.kind not in get_args(Kind):
        raise refused("kind", config.kind, "This is not a launcher.", f"Choose one of {', '.join(get_args(Kind))}.")
    _check_numbers(config)
    check_installed(config.kind)
    _check_environment(config)
    if config.engine is not None or config.address is not None or config.engine_options:
        _check_engine(config)
    # The machines of an engine resolve the rest for themselves.
    if config.engine is not None:
        return _as_checked(replace(config, processes=1 if config.is_one_process else config.processes), use_cpu)
    if config.config_file is not None and config.kind != "accelerate":
        raise refused("config_file", config.config_file, "Only accelerate reads this file.", "Set kind=accelerate.")
    if config.kind == "accelerate":
        config = _with_accelerate_file(config)
    if config.kind == "environment":
        config = _with_environment(config)
    _check_nodes(config)
    config = replace(config, processes=_processes(config, use_cpu=use_cpu))
    if config.kind == "auto":
        single = config.processes == 1 and not config.several_nodes
        config = replace(config, kind="process" if single else "torchrun")
    if config.is_one_process and config.world_size > 1:
        name = "nodes" if config.several_nodes else "processes"
        remedy = "Set kind=torchrun, or one process on one machine."
        raise refused(name, getattr(config, name), f"The launcher '{config.kind}' runs one process.", remedy)
    return _as_checked(config, use_cpu)


def _as_checked(config: LaunchConfig, use_cpu: bool) -> LaunchConfig:
    config = replace(config)  # the caller's own configuration stays as it is
    object.__setattr__(config, "_checked_for_cpu", use_cpu)
    return config


def from_settings(settings: Mapping[str, Any]) -> LaunchConfig:
    """Build a configuration from plain data: a spec's settings, or a file's."""
    known = {setting.name for setting in fields(LaunchConfig)}
    given = {name: value for name, value in settings.items() if name in known}
    if given.get("devices") is not None:
        given["devices"] = tuple(given["devices"])
    return LaunchConfig(**given)


def _check_environment(config: LaunchConfig) -> None:
    for name in config.env:
        if name.startswith(("ACCELERATE_", "FSDP_")):
            remedy = "Set the argument itself in train.args, or kind=accelerate with a config_file."
            raise refused("env", name, "This variable would change what is trained, but not the stage's key.", remedy)
    if config.devices is not None and "CUDA_VISIBLE_DEVICES" in config.env:
        value = config.env["CUDA_VISIBLE_DEVICES"]
        what = f"The setting env gives CUDA_VISIBLE_DEVICES={value} as well."
        raise refused("devices", list(config.devices), what, "Keep one of the two.")
    # The environment counts as well: the workers inherit it.
    check_selection({**os.environ, **config.env, **selection_variables(config.devices, config.device_order)})


def _with_accelerate_file(config: LaunchConfig) -> LaunchConfig:
    from trainer_lib.launch.settings import accelerate

    written = accelerate.read_launch_settings(config.config_file)
    for name, value in written.items():
        given, default = getattr(config, name), getattr(LaunchConfig(), name)
        if given not in (default, value):
            remedy = "Remove one of the two, or make them equal."
            raise refused(name, given, f"The file {config.config_file} gives {value}.", remedy)
    config = replace(config, **written)
    # Several machines always start through our own agent; the file's other settings have become arguments already.
    return replace(config, kind="torchrun") if config.several_nodes else config


def _check_numbers(config: LaunchConfig) -> None:
    for name, least in _LEAST.items():
        value = getattr(config, name)
        if isinstance(value, int | float) and value < least:
            raise refused(name, value, f"The number must be at least {least}.", "Raise it, or leave it out.")
    _check_range(config)


def _check_range(config: LaunchConfig) -> None:
    try:
        least, most = config.node_range
    except ValueError:
        what = "This is neither a number of machines nor a range."
        raise refused("nodes", config.nodes, what, 'Write 2, or "1:4".') from None
    if not 1 <= least <= most:
        remedy = 'Write the smaller number first: "1:4".'
        raise refused("nodes", config.nodes, "This is not a range of machines.", remedy)


def _check_nodes(config: LaunchConfig) -> None:
    _check_range(config)  # again: a scheduler or a file may have given it
    if not config.several_nodes:
        return
    most = config.node_range[1]
    if config.kind not in ("auto", "torchrun"):
        remedy = "Set kind=torchrun for several machines."
        raise refused("kind", config.kind, "This launcher starts the processes of one machine only.", remedy)
    if config.node_rank is not None and not 0 <= config.node_rank < most:
        raise refused("node_rank", config.node_rank, f"There are at most {most} machines.", "Count from 0.")
    try:
        host, port = config.endpoint
    except ValueError:
        host, port = "", 0
    if not host or not 0 < port < 65536:
        remedy = "Name the leading machine's address and a free port: 10.0.0.1:29500."
        raise refused("rendezvous", config.rendezvous, "No address was given where the machines meet.", remedy)


def check_rendezvous(config: LaunchConfig) -> None:
    """Raise ConfigError unless this machine, which is about to lead, has the address and the port is free."""
    import socket  # only the leading machine of several gets here, and every command reads launch settings

    host, port = config.endpoint
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            # A port that the last run has just closed counts as free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        what = f"This machine cannot listen there: {error.strerror or error}."
        remedy = "Give an address of this machine, which leads (node_rank 0), and a free port."
        raise refused("rendezvous", config.rendezvous, what, remedy) from error


def _processes(config: LaunchConfig, *, use_cpu: bool) -> int:
    chosen = selection_variables(config.devices, config.device_order)
    on_devices = 0 if use_cpu else num_devices({**os.environ, **config.env, **chosen})
    if config.devices is not None and not use_cpu and on_devices == 0:
        raise refused("devices", list(config.devices), "This machine has no CUDA device.", "Leave it out.")
    if config.processes == "auto":
        return 1 if config.is_one_process else on_devices or min(num_cores(), 2)
    if "TRAINFLOW_LOCAL_RANK" in config.env:
        return config.processes  # one task of several here: the scheduler that started them has counted the devices
    if on_devices and config.processes > on_devices:
        what = f"This machine offers {counted(on_devices, 'CUDA device')}, and each process needs its own."
        remedy = f"Use at most {on_devices}, or train on the CPU with train.args.use_cpu=true."
        raise refused("processes", config.processes, what, remedy)
    if not on_devices and config.processes > num_cores():
        what = f"This process may use {counted(num_cores(), 'CPU core')}, and further workers would only wait for them."
        raise refused("processes", config.processes, what, f"Use at most {num_cores()}.")
    return config.processes


def _with_environment(config: LaunchConfig) -> LaunchConfig:
    """Take the place of this machine or process that a scheduler assigned; raise ConfigError when there is none."""
    found = environment.ranks()
    # A PyTorchJob sets RANK as well, which numbers its pods, however many processes they have.
    machines = environment.find_machines()
    if machines is not None and (found is environment.ALONE or machines.source == "PET_NNODES"):
        return _with_machines(config, machines)
    # One process of one is a job too; no variable at all means that machines would train alone.
    if found is environment.ALONE and not environment.is_whole_job():
        looked = ", ".join(environment.LOOKED_FOR)
        raise refused(
            "kind",
            config.kind,
            f"No scheduler described a job to this process: none of {looked} is set.",
            "Start the command through the scheduler (Slurm: srun, also in a batch script), write nodes, node_rank and "
            "rendezvous, or set kind=auto for this machine alone.",
        )
    return _with_ranks(config, found)


def _with_machines(config: LaunchConfig, found: environment.Machines) -> LaunchConfig:
    """Take the machines that Kubeflow, SkyPilot or dstack started: they start their own processes."""
    if found.processes is not None:
        if config.processes not in ("auto", found.processes):
            what = f"The job starts {found.processes} processes on each machine (PET_NPROC_PER_NODE)."
            raise refused("processes", config.processes, what, "Leave it out, or make them equal.")
        config = replace(config, processes=found.processes)
    return _among(config, found.nodes, found.node_rank, found.master)


def _with_ranks(config: LaunchConfig, found: environment.Ranks) -> LaunchConfig:
    """Take the ranks that Slurm, MPI or an enclosing torchrun assigned: the processes that they started are nodes."""
    if found.local_world_size > 1 and found.world_size > 1:
        if config.processes not in ("auto", 1):
            what = f"Each of this machine's {found.local_world_size} tasks is one process ({found.source})."
            raise refused("processes", config.processes, what, "Leave it out, or start one task per machine.")
        local = {"TRAINFLOW_LOCAL_RANK": f"{found.local_rank}/{found.local_world_size}"}
        config = replace(config, processes=1, env={**config.env, **local})
    return _among(config, found.world_size, found.rank, found.master)


def _among(config: LaunchConfig, nodes: int | str, rank: int | None, master: tuple[str, int] | None) -> LaunchConfig:
    """Take a place among the machines of a job; one of one is a machine alone."""
    placed = replace(config, kind="torchrun", nodes=nodes, node_rank=rank)
    if not placed.several_nodes:
        return replace(placed, kind="auto", nodes=1, node_rank=None, rendezvous=None)
    return replace(placed, rendezvous=config.rendezvous or (":".join(map(str, master)) if master else None))


def _check_engine(config: LaunchConfig) -> None:
    known = get_args(Engine)
    if config.engine is None:
        name = "address" if config.address is not None else "engine_options"
        remedy = f"Set engine ({', '.join(known)})."
        raise refused(name, getattr(config, name), "Only an engine reads this setting.", remedy)
    if config.engine not in known:
        raise refused("engine", config.engine, "This is not an engine.", f"Choose one of {', '.join(known)}.")
    if config.kind not in ("auto", "torchrun", "process"):
        raise refused("kind", config.kind, "An engine starts the processes of each machine itself.", "Remove it.")
    for name in _DECIDED:
        if (value := getattr(config, name)) is not None:
            raise refused(name, value, f"The engine {config.engine} decides this on the cluster.", "Remove it.")
    if config.processes == "auto" and not config.is_one_process:
        what = "The devices of the cluster's machines cannot be seen from here, and the global batch depends on them."
        raise refused("processes", "auto", what, "Give the number of processes of each machine.")
    if config.is_one_process and config.several_nodes:
        raise refused("nodes", config.nodes, "The launcher 'process' runs one process.", "Set kind=auto.")
    if config.engine == "ray":
        _check_ray(config)
    else:
        _check_slurm(config)


def _check_ray(config: LaunchConfig) -> None:
    if importlib.util.find_spec("ray") is None:  # finds it without importing it
        what = "This engine belongs to the package ray, which is not installed."
        raise MissingExtraError(what, extra="ray", field="train.launch.engine", value="ray")
    if config.address is not None and not re.fullmatch(r"auto|[^/\s]+:\d+", config.address):
        remedy = "Give host:port of its head, and run the command on a machine of the cluster; ray:// is not served."
        raise refused("address", config.address, "This is not the address of a Ray cluster.", remedy)
    for name, value in config.engine_options.items():
        if not _RESOURCE.fullmatch(name) or isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            remedy = "Give a number from 0 on for cpus, gpus, memory (bytes) or a custom resource of the cluster."
            raise refused(f"engine_options.{name}", value, "This is not an amount of a resource.", remedy)


def _check_slurm(config: LaunchConfig) -> None:
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            remedy = "Run the command where jobs are submitted, on a login node of the cluster."
            raise refused("engine", "slurm", f"Slurm's program {program} is not on this machine's PATH.", remedy)
    if config.address is not None:
        remedy = "Remove it (engine_options.clusters)."
        raise refused("address", config.address, "Slurm's programs know their cluster.", remedy)
    for name, value in config.engine_options.items():
        if name in _OURS:
            remedy = "Remove it." if _OURS[name] == "nothing" else f"Remove it; see {_OURS[name]}."
            what = "trainflow passes this option to sbatch itself."
            raise refused(f"engine_options.{name}", value, what, remedy)


def refused(name: str, value: object, message: str, remedy: str) -> ConfigError:
    """Return the error for a setting, named as in the spec's train section."""
    return ConfigError(message, field=f"train.launch.{name}", value=value, remedy=remedy)


def unshared(host: str, url: str) -> ConfigError:
    """Return the error of a machine of a cluster that does not see the job's folder."""
    what = f"The machine {host} does not see this folder as this machine does."
    remedy = "Use a store, or a folder, that all machines of the cluster share."
    return ConfigError(what, field="storage", value=url, remedy=remedy)


def require_torch() -> None:
    """Raises MissingExtraError where torch is not installed: no worker could start."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch is not installed here, and the workers of every stage need it.", extra="torch")


def check_installed(kind: str) -> None:
    """Raises MissingExtraError where the package that brings this launcher is not installed."""
    extra = {"accelerate": "torch", "deepspeed": "deepspeed"}.get(kind)  # each launcher has its package's name
    if extra is not None and importlib.util.find_spec(kind) is None:
        what = f"This launcher belongs to the package {kind}, which is not installed."
        raise MissingExtraError(what, extra=extra, field="train.launch.kind", value=kind)
