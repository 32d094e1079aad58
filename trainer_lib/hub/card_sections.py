"""A model card that is renewed without losing what its author wrote.

What trainflow writes stands between two comments, `<!-- trainflow:results -->` and `<!-- /trainflow:results -->`.
Everything else is the author's, and so are fields of the YAML head that trainflow does not set.
"""

from __future__ import annotations

import re
from typing import Any

from trainer_lib.errors import ConfigError

_SECTION = re.compile(r"<!-- trainflow:(?P<name>[a-z-]+) -->\n.*?<!-- /trainflow:(?P=name) -->\n?", re.DOTALL)
_RELATIVE_PICTURE = re.compile(r"(!\[[^\]]*\]\()(?!/|[a-z]+:)")
_GONE = "<!-- trainflow: gone -->"
_MARK = re.compile(r"<!-- /?trainflow:[a-z-]+ -->")


def mark_section(name: str, text: str) -> str:
    """The text between the marks of a section; empty text stays empty."""
    inside = remove_marks(text)
    return f"<!-- trainflow:{name} -->\n{inside}\n<!-- /trainflow:{name} -->" if inside.strip() else ""


def remove_marks(text: str) -> str:
    """The text without marks of sections, which a title or a description might hold."""
    return _MARK.sub("", text)


def merge_card(present: str | None, generated: str, *, field: str = "README.md") -> str:
    """The card that is there, with the sections and the head's fields that were generated in place of its own.

    A section that the author removed comes back at the end. A card without any marked section keeps its text, and
    gets all of them, unless trainflow wrote it before it marked its sections: then the new card takes its place.

    Raises:
        ConfigError: the head of the present card, which is at `field`, is not YAML.
    """
    new = {section["name"]: section[0] for section in _SECTION.finditer(generated)}
    if present is None or not present.strip() or not new:
        return generated
    head, text = split_card(present, field=field)
    if "trainflow" in head and not _SECTION.search(text):
        return generated
    new_head, _ = split_card(generated, field=field)
    merged = {**head, **new_head}
    tags = [*_as_list(head.get("tags")), *_as_list(new_head.get("tags"))]
    if tags:
        merged["tags"] = list(dict.fromkeys(tags))
    if results := [*_results(new_head), *_foreign_results(head)]:
        models = new_head.get("model-index") or head["model-index"]
        merged["model-index"] = [{**models[0], "results": results}]
    known = {found["name"] for found in _SECTION.finditer(text)}
    # One that is not written any more goes with the empty lines behind it, or they would add up.
    text = _SECTION.sub(lambda found: new.get(found["name"], _GONE), text)
    text = re.sub(f"{_GONE}\\n*", "", text).strip()
    added = [section.strip() for name, section in new.items() if name not in known]
    from trainer_lib.base.yaml_text import dump_yaml  # not above: every worker imports this module

    return "\n\n".join([f"---\n{dump_yaml(merged)}---", *filter(None, [text]), *added]) + "\n"


def choose_card(present: str | None, published: str, *, field: str = "README.md") -> str:
    """The card to show beside a publication: the published one, with what a person wrote in the present one.

    A published card without marked sections replaces a present one that has them, and no other.
    """
    if present is None or _SECTION.search(published):
        return merge_card(present, published, field=field)
    return published if _SECTION.search(present) else present


def insert_section(card: str, name: str, text: str) -> str:
    """The card with one more section, behind its first heading."""
    bare = _SECTION.sub(lambda found: "" if found["name"] == name else found[0], card)
    lines = [*bare.strip().split("\n"), ""]
    behind_head = lines.index("---", 1) + 1 if lines[0] == "---" and "---" in lines[1:] else 0
    headings = (number + 1 for number, line in enumerate(lines) if number >= behind_head and line.startswith("# "))
    place = next(headings, behind_head)
    before, after = "\n".join(lines[:place]).strip(), "\n".join(lines[place:]).strip()
    return "\n\n".join(filter(None, [before, mark_section(name, text), after])) + "\n"


def move_pictures(card: str, folder: str) -> str:
    """The card as it stands above `folder`, in which the pictures of its own sections are."""
    return _SECTION.sub(lambda found: _RELATIVE_PICTURE.sub(rf"\1{folder}/", found[0]), card)


def split_card(card: str, *, field: str = "README.md") -> tuple[dict[str, Any], str]:
    """Return head and text of a card; the head is the first thing in the file, and empty where there is none.

    Raises:
        ConfigError: the head is not YAML.
    """
    from trainer_lib.base.yaml_text import YamlProblem, parse_yaml

    parts = card.replace("\r\n", "\n").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}, card
    try:
        head = parse_yaml(parts[1])
    except YamlProblem as problem:
        raise ConfigError(
            f"The head of the model card that is published there is not YAML: {problem}",
            field=field,
            remedy="Correct the lines between --- there, then publish again.",
        ) from problem
    return (head if isinstance(head, dict) else {}), parts[2]


def _results(head: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of the head's model-index; what is not one is left out."""
    models = head.get("model-index")
    found = [model.get("results") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    return [result for results in found if isinstance(results, list) for result in results if isinstance(result, dict)]


def _foreign_results(head: dict[str, Any]) -> list[dict[str, Any]]:
    """The results that others have added, such as a leaderboard's: not on the data that trainflow measured on."""
    ours = head.get("trainflow")
    digest = ours.get("data_digest") if isinstance(ours, dict) else None
    if digest is None:
        return []
    datasets = [(result, result.get("dataset")) for result in _results(head)]
    return [result for result, dataset in datasets if isinstance(dataset, dict) and dataset.get("revision") != digest]


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value or ())
