"""README, docs, pyproject.toml, constraints.txt, Makefile and the command line agree with each other."""

from __future__ import annotations

import functools
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.repository import ROOT, pyproject, relative

PAGES = sorted(
    [*ROOT.glob("*.md"), ROOT / "tests/README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/README.md")]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
ANCHOR = re.compile(r'<a id="([^"]+)">')
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
#: A command in a block of code, fenced or indented, or between backticks.
COMMAND = re.compile(r"(?:^(?: {4,}|\$ | {4,}\$ )|`)(?:\.venv/bin/)?(trainflow [^`\n]+)", re.MULTILINE)


@functools.cache
def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Zensical make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = HEADING.findall(text)
    plain = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain} | set(
        ANCHOR.findall(text)
    )


def _dead_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            yield link


def test_every_link_leads_somewhere() -> None:
    assert [f"{relative(page)}: {link}" for page in PAGES for link in _dead_links(page)] == []


@functools.cache
def _command_line() -> Any:
    from trainflow.flows.cli.main import application

    return typer.main.get_command(application())


def _commands(page: Path) -> Iterator[list[str]]:
    blocks = FENCE.sub(lambda block: textwrap.indent(block[0], "    "), page.read_text(encoding="utf-8"))
    for text in COMMAND.findall(blocks):
        line = re.split(r" +#|\\$| && | \| | > |;|…|\.\.\.", text)[0]
        try:
            words = shlex.split(line)
        except ValueError:
            continue  # half a command in running text
        # Several at once: `trainflow lineage X`, `verify X`.
        yield [word.strip("[],.") for word in words[1:]]


def _wrong(words: list[str]) -> str | None:
    """What is wrong with the words of a command; None: nothing."""
    command = _command_line()
    rest = list(words)
    while hasattr(command, "commands"):
        if not rest or rest[0].startswith("-") or not rest[0].isascii():
            return None
        found = command.commands.get(rest[0].split("|")[0])
        if found is None:
            return f"no command '{rest[0]}'"
        command, rest = found, rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    strange = [word for word in rest if word.startswith("--") and word.split("=")[0] not in known]
    return f"{command.name} has no {', '.join(strange)}" if strange else None


def test_every_command_exists() -> None:
    commands = [(page, words) for page in PAGES for words in _commands(page)]
    assert [f"{relative(page)}: {words}: {why}" for page, words in commands if (why := _wrong(words))] == []


# ------------------------------------------------------------------------------------------------- packages and errors
FLOORS = {"torch": "2.10", "transformers": "5.3", "mlflow": "3.11", "prefect": "3.6.28"}


def _pins(file: str = "constraints.txt") -> dict[str, Version]:
    lines = (line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
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


def test_the_lowest_set_is_at_the_floors() -> None:
    pins = _pins("constraints-lowest.txt")
    of_dev = [requirement for requirement in _requirements() if canonicalize_name(requirement.name) in pins]
    assert {"mlflow", "openpyxl", "prefect", "transformers"} <= {requirement.name for requirement in of_dev}
    for requirement in of_dev:
        pin = pins[canonicalize_name(requirement.name)]
        assert pin in requirement.specifier, requirement
        for floor in (Version(bound.version) for bound in requirement.specifier if bound.operator == ">="):
            is_at_floor = pin.release[: len(floor.release)] == floor.release
            assert is_at_floor or requirement.name == "torch", f"{requirement}: {pin} is what ran"


def test_no_dependency_reaches_below_a_published_vulnerability() -> None:
    floors = {name: Version(version) for name, version in FLOORS.items()}
    for requirement in _requirements():
        if (floor := floors.get(requirement.name)) is not None:
            assert not list(requirement.specifier.filter([f"{floor.major}.{floor.minor - 1}.99"])), requirement


def test_all_brings_every_extra() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras.pop("all"))
    assert everything.extras == set(extras)


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
        named |= {name for block in code for name in re.findall(r"^(?:\$ )?make ([a-z][\w-]*)", block, re.MULTILINE)}
    assert {"demo", "test", "check"} <= named <= targets


def test_every_field_of_a_spec_is_documented() -> None:
    from trainflow.flows.spec import sweep_settings
    from trainflow.flows.spec.spec import PipelineSpec
    from trainflow.tasks import configs, settings
    from trainflow.tasks.tracking import notifying

    text = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    models: list[Any] = [PipelineSpec, settings.RunnerSettings, notifying.NotifySettings]
    models += [configs.PrepareConfig, configs.TrainConfig, configs.EvaluateConfig, configs.PredictConfig]
    models += [
        configs.StopEarlySettings,
        configs.PreemptionSettings,
        configs.PublishConfig,
        configs.TrackingConfig,
        configs.RegisterConfig,
    ]
    models += [sweep_settings.SweepSettings, sweep_settings.PrunerSettings, sweep_settings.Range]
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
