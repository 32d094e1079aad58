"""Writes a new project into an empty folder."""

from __future__ import annotations

import functools
import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_lib.base.suggestions import require_known
from trainer_lib.base.yaml_text import parse_yaml
from trainer_lib.errors import ConfigError, StorageError

_GITIGNORE = ".trainflow/\npredictions/\n__pycache__/\n.pytest_cache/\n"


def read_sample(name: str) -> str:
    """The sample data of this name in samples.zip; LICENSES.txt in it says where all of it is from."""
    with zipfile.ZipFile(Path(__file__).with_name("samples.zip")) as samples:
        return samples.read(name).decode()


def digits() -> dict[str, bytes]:
    """600 scans of handwritten digits of 8 x 8 pixels, as PNG files by class (scikit-learn, from UCI, CC BY 4.0)."""
    from PIL import Image
    from sklearn import datasets

    data = datasets.load_digits()
    files: dict[str, bytes] = {}
    for number, (scan, target) in enumerate(zip(data.images[:600], data.target, strict=False)):
        written = io.BytesIO()
        Image.fromarray((scan * (255 / 16)).astype("uint8")).save(written, "PNG")
        files[f"{target}/{number:04}.png"] = written.getvalue()
    return files


@functools.cache
def templates() -> dict[str, dict[str, Any]]:
    """The facts of projects in templates.yaml, by the names of their recipes."""
    found: dict[str, dict[str, Any]] = parse_yaml(Path(__file__).with_name("templates.yaml").read_text("utf-8"))
    return {name: {"by": "random", "column": "label", **facts} for name, facts in found.items() if name != "_"}


def check_target(folder: Path, recipe: str) -> None:
    """Raise ConfigError unless a project with this recipe can be written into a folder."""
    from trainflow.flows.spec.spec import PipelineSpec

    require_known(recipe, templates(), "No recipe has this name.", field="--recipe")
    name = folder.absolute().name
    pattern = next(rule.pattern for rule in PipelineSpec.model_fields["name"].metadata if hasattr(rule, "pattern"))
    if not re.match(pattern, name):
        remedy = str(PipelineSpec.model_fields["name"].description)
        raise ConfigError("A pipeline cannot have this name.", field="NAME", value=name, remedy=remedy)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "The folder is not empty." if folder.is_dir() else "This is a file."
        raise ConfigError(what, field="NAME", value=str(folder), remedy="Give the name of a new folder.")


def write_project(folder: Path, recipe: str) -> list[Path]:
    """Write a project; returns its files, and the folder of its data where there are many. Raises StorageError."""
    check_target(folder, recipe)
    name = folder.absolute().name
    module = "".join(char if char.isalnum() else "_" for char in name.lower())
    facts = {"name": name, "recipe": recipe, "module": module, **templates()[recipe]}
    texts = {
        "pipeline.yaml": _render("pipeline.yaml.j2", facts),
        f"test_{module}.py": _render("test_project.py.j2", facts),
        "README.md": _render("README.md.j2", facts),
        "schema.json": _schema(),
        ".gitignore": _GITIGNORE,
    }
    data, contents = facts["data"], {file: text.encode() for file, text in texts.items()}
    if data == "digits":
        contents |= {f"{data}/{at}": content for at, content in digits().items()}
    else:
        contents[data] = read_sample(facts["sample"]).encode()
    _write(folder, contents)
    return [folder / file for file in (*texts, data)]


def write_project_for(folder: Path, address: str, label: str | None) -> list[Path]:
    """Write a spec for files that are there, with guesses (`from_file`); returns the files. Raises DataError."""
    from trainflow.flows.new_project.from_file import find_recipe_of_texts, guess_spec, source_from

    check_target(folder, "tabular-classification")
    name, found = folder.absolute().name, None if label else find_recipe_of_texts(address)
    if found is None:
        text = _render("guessed.yaml.j2", {"name": name, **guess_spec(folder.absolute(), address, label)})
    else:
        recipe, facts = found
        facts = facts | {
            "data": source_from(folder.absolute(), address)[1],
            "about": f"Learned from {Path(address).name}.",
        }
        text = _render("pipeline.yaml.j2", {"name": name, "recipe": recipe, **templates()[recipe], **facts})
    contents = {"pipeline.yaml": text, "schema.json": _schema(), ".gitignore": _GITIGNORE}
    return _write(folder, {name: content.encode() for name, content in contents.items()})


def _write(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    try:
        for file, content in contents.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
    except OSError as error:
        what = f"The project cannot be written: {error.strerror}."
        raise StorageError(what, field="NAME", value=str(folder), remedy="Give a folder that you may write.") from error
    return [folder / file for file in contents]


def _schema() -> str:
    from trainflow.flows.spec.schema import spec_schema

    return json.dumps(spec_schema(), indent=1) + "\n"


def _render(template: str, facts: Mapping[str, Any]) -> str:
    import jinja2

    source = (Path(__file__).parent / template).read_text("utf-8")
    # The files are YAML, Python and Markdown, not HTML.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701
    return environment.from_string(source).render(facts)
