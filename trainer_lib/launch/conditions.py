"""What a process takes from its surroundings when it starts, and what must be equal for a fork to replace a start.

A forked process has read some variables and limits already, when its parent was started. Here they are collected, so
that two starts with equal conditions are the same start.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer_lib.launch.gpu_selection import has_accelerator

SWITCH = "TRAINFLOW_WARM"
# What Python, torch, numpy and their C libraries read while they are imported; a test records it.
# fmt: off
FAMILIES = (
    "ACC_", "AOT", "ARROW_", "ATEN_", "COMPILE_", "CUTEDSL_", "CUTLASS_", "DNNL_", "DUMP_", "ENABLE_",
    "FAKE_", "FX_", "GFORTRAN_", "GLIBC_", "GOMP_", "GOTO_", "INDUCTOR_", "INTEL_", "I_MPI_", "JE_",
    "KINETO_", "KMP_", "LC_", "LD_", "LOG_", "MALLOC_", "MKL", "MPI_", "MPMATH_", "NPY_", "NUMBA_",
    "NUMEXPR_", "NUMPY_", "NVPL_", "OMPI_", "OMP_", "ONEDNN_", "OPENBLAS_", "OPENSSL_", "PANDAS_",
    "PARTITIONER_", "PT2_", "PYTHON", "PYTORCH_", "SAGE_", "SSL", "SYMPY_", "TORCH", "TRITON_", "UNSAFE_",
    "VECLIB_", "XDG_", "_PYTHON", "__PYVENV",
)
NAMES = frozenset((
    "AZURE_LOG_LEVEL", "CI", "CXX", "HOME", "LANG", "LANGUAGE", "LNAME", "LOGLEVEL", "LOGNAME", "PATH",
    "TEMP", "TMP", "TMPDIR", "TZ", "USER", "USERNAME",
))
# fmt: on
# The fields of proc(5) that a child inherits.
_INHERITED = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "Cpus_allowed", "Mems_allowed")
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def can_be_warm(environment: Mapping[str, str]) -> bool:
    """Whether workers with these variables may be forked: on Linux, without an accelerator, unless switched off."""
    return (
        sys.platform == "linux"
        and hasattr(os, "pidfd_open")
        and environment.get(SWITCH, "1") != "0"
        and "PYTHON_EXEC" not in environment  # torchrun would start that interpreter
        and not has_accelerator(environment)
    )


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an interpreter and torch read while they start."""
    return {name: value for name, value in sorted(environment.items()) if name in NAMES or name.startswith(FAMILIES)}


def read_conditions(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return all that a process with these variables would inherit now and could not change later, as texts."""
    import resource  # a module of Unix

    variables = [f"{name}={value}" for name, value in read_variables(environment).items()]
    status = _read("/proc/thread-self/status").splitlines()
    inherited = [line for line in status if line.partition(":")[0] in (*_INHERITED, *_CAPABILITIES)]
    numbers = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
    limits = [f"limit {number}: {resource.getrlimit(number)}" for number in numbers]
    spaces = [f"{path.name}: {path.readlink()}" for path in sorted(Path("/proc/thread-self/ns").iterdir())]
    others = [_read("/proc/thread-self/cgroup"), _read("/proc/self/oom_score_adj"), sys.executable]
    others += [f"nice {os.getpriority(os.PRIO_PROCESS, 0)}", f"mask {sorted(signal.pthread_sigmask(0, []))}"]
    # A relative folder on the path is found from the working directory.
    if any(not part.startswith("/") for part in environment.get("PYTHONPATH", "/").split(":")):
        others.append(str(Path.cwd()))
    return (*variables, *inherited, *limits, *spaces, *others)


def read_umask() -> int:
    """Return the mask of new files' permissions, which `os.umask` could only read by changing it."""
    rows = (line.partition(":") for line in _read("/proc/self/status").splitlines())
    return next((int(value, 8) for name, _, value in rows if name == "Umask"), 0o022)


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")
