"""The Markdown page of the results, and the machine that they were taken on."""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "triton", "bitsandbytes", "torchao", "liger-kernel")


def describe_machine(dry: bool) -> dict[str, Any]:
    """The date, the GPU, its driver and memory, cores, and the versions of packages; missing packages are named."""
    import torch

    versions = {name: _version(name) for name in (*PACKAGES, "deepspeed")}
    described: dict[str, Any] = {
        "taken": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": "CPU (a dry run: the numbers mean nothing)",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
        "missing": [name for name, version in versions.items() if not version],
    }
    if not dry:
        properties = torch.cuda.get_device_properties(0)
        described["device"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return described


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a folder of that name alone
        return "of an unknown version"


def render(machine: dict[str, Any], seconds: float, findings: Sequence[dict[str, Any]]) -> str:
    """The page: the machine, then a table with a line per finding."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    missing = ", ".join(machine["missing"]) or "none"
    head = (
        f"# On a GPU\n\nTaken {machine['taken']} with `make gpu` in {seconds:.0f} s on {machine['device']}, "
        f"{machine['cores']} cores, Python {machine['python']}; {versions}. Not installed: {missing}.\n\n"
    )
    lines = ["| row | case | measured | goal | |", "|---|---|---|---|---|"]
    for finding in findings:
        verdict = {True: "held", False: "**missed**", None: ""}[finding["held"]]
        cells = (finding["row"], finding["case"], finding["measured"], finding["goal"], verdict)
        lines.append("| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |")
    return head + "\n".join(lines) + "\n"
