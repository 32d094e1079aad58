"""The spec and the storage that a command or a call means when none was named: those of the working directory."""

from __future__ import annotations

from pathlib import Path

from trainer_lib.errors import ConfigError
from trainflow.flows.spec.spec import storage_of
from trainflow.flows.spec.spec_file import read_spec_file

_USUAL = Path("pipeline.yaml")
_ENDINGS = (".yaml", ".yml", ".json")
# A larger file is data: it is not read to find out.
_LARGEST = 1_000_000


def specs_here() -> list[Path]:
    """The specs of the working directory that may be meant: pipeline.yaml alone if it is there, else all of them."""
    if _USUAL.is_file():
        return [_USUAL]
    return [path for path in sorted(Path().iterdir()) if path.suffix in _ENDINGS and _is_spec(path)]


def spec_here() -> Path | None:
    """The spec of the working directory: pipeline.yaml, else the only one; None: it has none, or several."""
    found = specs_here()
    return found[0] if len(found) == 1 else None


def storage_here() -> str | None:
    """The storage of the spec in the working directory, else .trainflow there; None: it has neither.

    Raises:
        ConfigError: pipeline.yaml is not a spec.
    """
    if (spec := spec_here()) is not None:
        return storage_of(spec)
    return ".trainflow" if Path(".trainflow").is_dir() else None


def _is_spec(path: Path) -> bool:
    try:
        if path.stat().st_size > _LARGEST:
            return False
        data, _ = read_spec_file(path)
    except (ConfigError, OSError):
        return False
    return "recipe" in data and "name" in data
