"""The spec that a command means when its first word is not one: that of the working directory."""

from __future__ import annotations

from pathlib import Path

from flows.spec.spec_file import read_spec_file
from trainer_lib.errors import ConfigError

_USUAL = Path("pipeline.yaml")
_ENDINGS = (".yaml", ".yml", ".json")


def choose_spec_file(spec: Path | None, overrides: list[str] | None) -> tuple[Path, list[str]]:
    """The spec and the overrides among a command's words; without a spec pipeline.yaml here, else the only one here.

    Raises:
        ConfigError: there is none, or there are several.
    """
    words = overrides or []
    if spec is not None:
        if "=" not in str(spec) or spec.exists():
            return spec, words
        words = [str(spec), *words]
    if _USUAL.is_file():
        return _USUAL, words
    found = [path for path in sorted(Path().iterdir()) if path.suffix in _ENDINGS and _is_spec(path)]
    if len(found) == 1:
        return found[0], words
    if not found:
        raise ConfigError(
            "No spec was named, and this folder has none.",
            field="SPEC",
            remedy="Name one (pipeline.yaml), or write a project: trainflow init NAME.",
        )
    raise ConfigError(
        f"No spec was named, and this folder has several: {', '.join(map(str, found))}.",
        field="SPEC",
        remedy=f"Name one of them: {found[0]}.",
    )


def _is_spec(path: Path) -> bool:
    try:
        data, _ = read_spec_file(path)
    except ConfigError:
        return False
    return "recipe" in data and "name" in data
