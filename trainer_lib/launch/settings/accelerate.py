"""`accelerate launch`: its configuration file and its command line. The package is executed, never imported here.

The file's settings of arguments (mixed precision, FSDP, DeepSpeed …) are translated through the variables that
`accelerate launch` would set (`trainer_lib.arguments.foreign_arguments`), so that a spec has them before it starts. The
file's settings of processes and machines become launch settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_lib.arguments import foreign_arguments
from trainer_lib.arguments.coerce import coerce, read_mapping
from trainer_lib.errors import ConfigError

_FIELD = "train.launch.config_file"
_SHARDED = ("FSDP", "DEEPSPEED")
_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", *_SHARDED)
# Keys of `deepspeed_config` whose variable is not the key in capitals.
_DEEPSPEED = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
}
_FSDP = {"backward_prefetch_policy": "BACKWARD_PREFETCH", "transformer_layer_cls_to_wrap": "TRANSFORMER_CLS_TO_WRAP"}


def read_config(path: str) -> dict[str, Any]:
    """Read a configuration file of `accelerate config`. Raises ConfigError, also for training that is not served."""
    config = read_mapping(Path(path), field=_FIELD)
    kind = str(config.get("distributed_type", "NO")).upper()
    if kind not in _TYPES:
        raise _refused(path, f"The file's distributed_type {kind} is not served", f"Choose one of {', '.join(_TYPES)}.")
    where = str(config.get("compute_environment", "LOCAL_MACHINE"))
    if where != "LOCAL_MACHINE":
        raise _refused(path, f"The file's compute_environment {where} is not served", "Use LOCAL_MACHINE.")
    return {**config, "distributed_type": kind}


def merge_arguments(args: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the arguments with those that the file sets. Raises ConfigError, which names both, where they differ."""
    return foreign_arguments.merge(args, argument_variables(read_config(path)), prefix="train.args")


def argument_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of arguments that `accelerate launch` sets for this configuration."""
    found = {"ACCELERATE_MIXED_PRECISION": config.get("mixed_precision")}
    if coerce(config.get("use_cpu") or False, bool, field=f"{_FIELD}: use_cpu"):
        found["ACCELERATE_USE_CPU"] = "true"
    for key, value in (config.get("dynamo_config") or {}).items():
        found[f"ACCELERATE_DYNAMO_{key.removeprefix('dynamo_').upper()}"] = value
    kind = config["distributed_type"]
    if kind == "FSDP":
        found["ACCELERATE_USE_FSDP"] = "true"
        for key, value in (config.get("fsdp_config") or {}).items():
            short = key.removeprefix("fsdp_")
            found[f"FSDP_{_FSDP.get(short, short.upper())}"] = value
    if kind == "DEEPSPEED":
        found["ACCELERATE_USE_DEEPSPEED"] = "true"
        for key, value in (config.get("deepspeed_config") or {}).items():
            found[_DEEPSPEED.get(key, f"ACCELERATE_DEEPSPEED_{key.upper()}")] = value
    if sizes := config.get("parallelism_config"):
        found["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        found |= {key.upper(): value for key, value in sizes.items() if key.endswith("_size")}
    if config.get("megatron_lm_config"):  # which `foreign_arguments` refuses by this variable
        found["ACCELERATE_USE_MEGATRON_LM"] = "true"
    return {name: _text(value) for name, value in found.items() if value is not None}


def read_launch_settings(path: str | None) -> dict[str, Any]:
    """Read the file's settings of processes and machines, by their names in `LaunchConfig`."""
    if path is None:
        return {}
    config = read_config(path)
    machines, total = int(config.get("num_machines") or 1), int(config.get("num_processes") or 1)
    if total % machines:
        raise _refused(
            path,
            f"The file's num_processes {total} cannot be divided among num_machines {machines}",
            "Give a multiple of num_machines.",
        )
    settings: dict[str, Any] = {"processes": total // machines}
    if machines > 1:
        settings |= {"nodes": machines, "node_rank": int(config.get("machine_rank") or 0)}
        if config.get("main_process_ip"):
            # 29500 is accelerate's own default.
            settings["rendezvous"] = f"{config['main_process_ip']}:{config.get('main_process_port') or 29500}"
    ids = config.get("gpu_ids")
    if ids not in (None, "all"):
        settings["devices"] = tuple(int(part) for part in str(ids).split(","))
    return settings


def build_options(verb: str, run_dir: Path, processes: int, threads: str, path: str | None, port: int) -> list[str]:
    """Return the options with which `accelerate launch` starts `processes` workers."""
    kind = "NO" if path is None else read_config(path)["distributed_type"]
    if path is None:  # without a file, accelerate reads the one in the user's home, which the spec does not name
        path = str(run_dir / "accelerate.json")
        own = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "no"}
        Path(path).write_text(json.dumps({**own, "num_machines": 1, "num_processes": processes, "use_cpu": False}))
    # --multi_gpu on a CPU too: with --cpu, `accelerate launch` starts one process whatever number it is given.
    several = ["--multi_gpu"] if processes > 1 and kind not in _SHARDED else []
    return [
        *("--config_file", path),
        *("--num_processes", str(processes), "--num_machines", "1", "--main_process_port", str(port), *several),
        *("--num_cpu_threads_per_process", threads, "--log_dir", str(run_dir / "torchelastic")),
        *("-m", "trainer_lib.worker", verb, str(run_dir)),
    ]


def _text(value: Any) -> str:
    # A bool would become "True", which accelerate does not write.
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _refused(path: str, message: str, remedy: str) -> ConfigError:
    return ConfigError(f"{message}.", field=_FIELD, value=path, remedy=remedy)
