"""Writes a new project into an empty folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

from flows.new_project.starter_data import FILES
from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.suggestions import suggestion

_GITIGNORE = ".trainflow/\npredictions/\n__pycache__/\n.pytest_cache/\n"
_RANDOM_BERT = """\
  # At random from a configuration of transformers; or {pretrained: NAME}, in prepare.options as well.
  model: {config: {model_type: bert, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2}}"""
_RANDOM_LLAMA = """\
  # At random from a configuration of transformers; or {pretrained: NAME}, in prepare.options as well.
  model: {config: {model_type: llama, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2}}"""
_RANDOM_T5 = """\
  # At random from a configuration of transformers; or {pretrained: NAME}, in prepare.options as well.
  model: {config: {model_type: t5, d_model: 128, d_kv: 32, d_ff: 256, num_layers: 2, num_heads: 4}}"""
_FACTS = {
    "causal-language-modeling": {
        "options": "    length: 128\n    overlong: split  # a longer text becomes pieces; or drop, refuse\n"
        "    vocabulary: 1024",
        "by": "random",
        "model": _RANDOM_LLAMA,
        "rate": "3.0e-3",
        "margin": "nats_below_unigram",
        "trivial": "the frequencies of the tokens",
        "about": "Writes docstrings like those of Python's standard library.",
        "column": "text",
        "source": "docstrings of Python's standard library (PSF licence).",
    },
    "embeddings": {
        "options": "    query: entity\n    positive: character\n    vocabulary: 400\n    max_length: 48",
        "by": "random",
        "model": _RANDOM_BERT,
        "rate": "2.0e-3",
        "margin": "mrr_over_overlap",
        "trivial": "counting the tokens in common",
        "about": "Finds the character that a name of HTML means.",
        "column": "positive",
        "source": "HTML's and Unicode's names of characters, out of Python's copies (WHATWG and Unicode licences).",
    },
    "image-classification": {
        "options": "    size: 16      # pixels of a side\n    colours: grey",
        "by": "stratified",
        "model": "  model: {channels: [16, 32], augment: {shift: 0.1, rotate: 10.0}}",
        "rate": "3.0e-3",
        "margin": "accuracy_over_majority",
        "trivial": "always the most frequent class",
        "about": "Reads a handwritten digit.",
        "column": "",
        "source": "600 scans of digits, which scikit-learn ships (UCI repository, CC BY 4.0).",
    },
    "preference-optimization": {
        "options": "    # At random from a configuration of transformers; or pretrained: NAME, in train.model too.\n"
        "    config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2}\n"
        "    vocabulary: 1000\n    max_length: 96  # tokens of a prompt with an answer",
        "by": "random",
        "model": "  model: {beta: 0.1}  # how much a distance from the model before its training counts",
        "rate": "5.0e-3",
        "margin": "accuracy_over_length",
        "trivial": "always the longer answer, or always the shorter one",
        "about": "Tells a sentence from its words in another order.",
        "column": "prompt",
        "source": "sentences of docstrings of Python's standard library (PSF licence); the rejected answers are their "
        "words in an order that was drawn.",
    },
    "question-answering": {
        "options": "    max_length: 128  # tokens of a window; a longer context has several\n    stride: 32",
        "by": "random",
        "model": _RANDOM_BERT,
        "rate": "1.0e-3",
        "margin": "f1_over_usual",
        "trivial": "the answer that each question had most often in training",
        "about": "Finds what a function of Python takes, returns or raises.",
        "column": "answers",
        "source": "functions of Python's standard library, with questions by its parser (PSF licence).",
    },
    "sequence-to-sequence": {
        "options": "    text: name\n    target: parts\n    vocabulary: 600\n    max_length: 48    # tokens to read\n"
        "    target_length: 48 # tokens to write",
        "by": "random",
        "model": _RANDOM_T5,
        "rate": "3.0e-3",
        "margin": "chrf_over_lead",
        "trivial": "the first words of what is read",
        "about": "Names the parts that a character consists of.",
        "column": "target",
        "source": "names of characters, out of Python's copy of the Unicode character database (Unicode licence).",
    },
    "tabular-classification": {
        "options": "    label: cultivar",
        "by": "stratified",
        "model": "  model: {hidden: [64], dropout: 0.1}",
        "rate": "5.0e-3",
        "margin": "accuracy_over_majority",
        "trivial": "always the most frequent class",
        "about": "Tells the cultivar of a wine from what a laboratory measured.",
        "column": "label",
        "source": "measurements of 178 wines, which scikit-learn ships (UCI repository, CC BY 4.0).",
    },
    "tabular-regression": {
        "options": "    label: progression",
        "by": "random",
        "model": "  model: {hidden: [64], dropout: 0.1}",
        "rate": "5.0e-3",
        "margin": "rmse_below_mean",
        "trivial": "always the mean",
        "about": "Estimates the progression of diabetes within a year.",
        "column": "label",
        "source": "measurements of 442 patients, which scikit-learn ships (Efron et al., 2004).",
    },
    "text-classification": {
        "options": "    text: line\n    label: module",
        "by": "stratified",
        "model": _RANDOM_BERT,
        "rate": "1.0e-3",
        "margin": "accuracy_over_majority",
        "trivial": "always the most frequent class",
        "about": "Tells which module of the standard library a line of Python is from.",
        "column": "label",
        "source": "lines of four modules of Python's standard library (PSF licence).",
    },
    "time-series-forecasting": {
        "options": "    time: month\n    target: temperature\n    context: 36   # months that a forecast knows\n"
        "    horizon: 6    # months to forecast\n    season: 12",
        "by": "time",
        "model": "  model: {hidden: []}  # linear; or sizes of layers, such as [64]",
        "rate": "1.0e-2",
        "margin": "mase_below_seasonal",
        "trivial": "repeating the last season",
        "about": "Forecasts the temperature of the sea for six months.",
        "column": "target",
        "source": "the sea's temperature off Peru by month (NOAA, ERSST.V3B, Nino 1+2, public domain).",
    },
    "token-classification": {
        "options": "    words: words\n    label: tags",
        "by": "random",
        "model": _RANDOM_BERT,
        "rate": "2.0e-3",
        "margin": "accuracy_over_usual",
        "trivial": "the tag that each word had most often in training",
        "about": "Tells the part that each word of a line of Python plays.",
        "column": "label",
        "source": "lines of Python's standard library, with tags by its parser (PSF licence).",
    },
}
"""Recipe -> what its texts say."""


def check_target(folder: Path, recipe: str) -> None:
    """Check that a project with this recipe can be written into a folder.

    Raises:
        ConfigError: the folder is not empty, its name cannot be a pipeline's, or no recipe has this name.
    """
    from flows.spec.spec import PipelineSpec

    if recipe not in _FACTS:
        raise ConfigError("No recipe has this name.", field="--recipe", value=recipe, remedy=suggestion(recipe, _FACTS))
    name = folder.absolute().name
    pattern = next(each.pattern for each in PipelineSpec.model_fields["name"].metadata if hasattr(each, "pattern"))
    if not re.match(pattern, name):
        remedy = str(PipelineSpec.model_fields["name"].description)
        raise ConfigError("A pipeline cannot have this name.", field="NAME", value=name, remedy=remedy)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "The folder is not empty." if folder.is_dir() else "This is a file."
        raise ConfigError(what, field="NAME", value=str(folder), remedy="Give the name of a new folder.")


def write_project(folder: Path, recipe: str) -> list[Path]:
    """Write a project; returns its files, and the folder of its data where there are many.

    Raises:
        ConfigError: as `check_target`. StorageError: the folder cannot be written.
    """
    check_target(folder, recipe)
    name = folder.absolute().name
    data, make = FILES[recipe]
    module = "".join(char if char.isalnum() else "_" for char in name.lower())
    facts = {"name": name, "recipe": recipe, "data": data, "module": module, **_FACTS[recipe]}
    texts = {
        "pipeline.yaml": _render("pipeline.yaml.j2", facts),
        f"test_{module}.py": _render("test_project.py.j2", facts),
        "README.md": _render("README.md.j2", facts),
        "schema.json": _schema(),
        ".gitignore": _GITIGNORE,
    }
    made = make()
    contents = {file: text.encode() for file, text in texts.items()}
    contents |= {data: made.encode()} if isinstance(made, str) else {f"{data}/{at}": each for at, each in made.items()}
    try:
        for file, content in contents.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
    except OSError as error:
        what = f"The project cannot be written: {error.strerror}."
        raise StorageError(what, field="NAME", value=str(folder), remedy="Give a folder that you may write.") from error
    return [folder / file for file in (*texts, data)]


def _schema() -> str:
    from flows.spec.schema import spec_schema

    return json.dumps(spec_schema(), indent=1) + "\n"


def _render(template: str, facts: dict[str, str]) -> str:
    import jinja2

    source = (Path(__file__).parent / template).read_text("utf-8")
    # The files are YAML, Python and Markdown, not HTML.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701
    return environment.from_string(source).render(facts)
