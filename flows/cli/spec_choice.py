"""What a command means by its words: a spec and overrides, a storage, or nothing, which is what this folder has."""

from __future__ import annotations

from pathlib import Path

from trainer_lib.errors import ConfigError
from trainflow.flows.spec.spec import spec_here, specs_here


def choose_spec_file(spec: Path | None, overrides: list[str] | None) -> tuple[Path, list[str]]:
    """The spec and the overrides among a command's words; without a spec pipeline.yaml here, else the only one here.

    Raises:
        ConfigError: there is none, or there are several.
    """
    spec, words = _divide(spec, overrides)
    if spec is not None:
        return spec, words
    found = specs_here()
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


def choose_spec_or_storage(
    spec: Path | None, overrides: list[str] | None, storage: str | None
) -> tuple[Path | None, list[str], str | None]:
    """The spec with its overrides, or the storage, that a command means; None for both: this folder has neither.

    Raises:
        ConfigError: a spec or an override is given beside a storage, or there are overrides and no spec for them.
    """
    spec, words = _divide(spec, overrides)
    if storage is not None:
        if spec is not None or words:
            why = "Give a spec or a storage, not both."
            raise ConfigError(why, field="--storage", value=storage, remedy="Drop one.")
        return None, [], storage
    if spec is not None or words:
        return *choose_spec_file(spec, words), None
    if (here := spec_here()) is not None:
        return here, [], None
    return None, [], ".trainflow" if Path(".trainflow").is_dir() else None


def _divide(spec: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """The first word of a command may be an override: then no spec was named."""
    words = overrides or []
    if spec is None or "=" not in str(spec) or spec.exists():
        return spec, words
    return None, [str(spec), *words]
