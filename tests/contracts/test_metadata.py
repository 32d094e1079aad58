"""pyproject.toml, constraints.txt, Makefile, README and the command line agree with each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.repository import ROOT, pyproject

FLOORS = {"torch": "2.10", "transformers": "5.3", "mlflow": "3.11", "prefect": "3.6.28"}


def _pins() -> dict[str, Version]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def _requirements() -> Iterator[Requirement]:
    project = pyproject()["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return (Requirement(text) for group in groups for text in group if not text.startswith("trainflow["))


def test_every_dependency_is_pinned_within_its_range() -> None:
    pins = _pins()
    for requirement in _requirements():
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_no_dependency_reaches_below_a_published_vulnerability() -> None:
    floors = {name: Version(version) for name, version in FLOORS.items()}
    for requirement in _requirements():
        if (floor := floors.get(requirement.name)) is not None:
            assert not list(requirement.specifier.filter([f"{floor.major}.{floor.minor - 1}.99"])), requirement


def test_all_brings_every_extra() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras.pop("all"))
    assert everything.extras == set(extras)


def _documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


def _commands(program: str) -> set[str]:
    """First words after `program` in the documents' console blocks and inline code."""
    found = set()
    for document in _documents():
        text = document.read_text(encoding="utf-8")
        code = re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
        for block in code:
            found |= set(re.findall(rf"^(?:\$ )?{program} ([a-z][\w-]*)", block, re.MULTILINE))
    return found


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "check"} <= _commands("make") <= targets


def test_every_field_of_a_spec_is_documented() -> None:
    from flows.spec.spec import PipelineSpec
    from tasks import configs, notify_settings, runner_settings, sweep_settings

    text = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    settings = (configs.PrepareConfig, configs.TrainConfig, configs.EvaluateConfig, configs.PredictConfig)
    models = (
        PipelineSpec,
        *settings,
        configs.PreemptionSettings,
        runner_settings.RunnerSettings,
        configs.PublishConfig,
        configs.TrackingConfig,
        configs.RegisterConfig,
        notify_settings.NotifySettings,
        sweep_settings.SweepSettings,
        sweep_settings.PrunerSettings,
        sweep_settings.Range,
    )
    launch: Any = configs.LaunchSettings  # a dataclass of pydantic's, whose fields have another name
    for cls, fields in (*((model, model.model_fields) for model in models), (launch, launch.__pydantic_fields__)):
        for name, field in fields.items():
            assert f"| `{name}` |" in text, f"{cls.__name__}.{name}"
            assert str(field.description) in text, f"{cls.__name__}.{name}: {field.description}"


def test_every_failure_and_its_exit_code_are_documented() -> None:
    from trainer_lib import errors

    cells = [row.split("|") for row in (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").splitlines()]
    table = {row[2]: int(row[1]) for row in cells if len(row) > 2 and row[1].strip().isdigit()}
    failures = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    for cls in failures:
        codes = [code for classes, code in table.items() if f"`{cls.__name__}`" in classes]
        assert codes == [getattr(cls, "exit_code", None)], cls.__name__
