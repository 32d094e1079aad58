"""The JSON schema of a spec, for editors: every key, its meaning, and the arguments of training."""

from __future__ import annotations

import enum
import functools
import typing
from typing import Any

from pydantic import TypeAdapter

from trainer_lib.errors import ConfigError
from trainer_lib.protocol.recipe_names import ABOUT
from trainflow.flows.spec.checks import DECIDED
from trainflow.flows.spec.spec import PipelineSpec

ARGUMENTS = "TrainingArguments"
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_TEXT: dict[str, Any] = {"type": "string"}


def spec_schema() -> dict[str, Any]:
    """The schema, draft 2020-12. Unknown keys and arguments are refused; what a recipe's options are is not known."""
    schema = PipelineSpec.model_json_schema()
    known: dict[str, Any] = schema["$defs"]
    known[ARGUMENTS] = {
        "type": "object",
        "additionalProperties": False,
        "description": "Arguments of the Trainer.",
        "properties": argument_schemas(),
    }
    for section in known.values():
        fields = section.get("properties", {})
        if "args" in fields:
            kept = {name: fields["args"][name] for name in ("description",) if name in fields["args"]}
            fields["args"] = {"anyOf": [{"$ref": f"#/$defs/{ARGUMENTS}"}, {"type": "null"}], **kept}
        if "launch" in fields:
            launch = fields["launch"]
            kinds = known["LaunchSettings"]["properties"]["kind"].get("enum", [])
            given = launch.pop("anyOf", None) or [{"$ref": launch.pop("$ref")}]
            # Written as its kind alone; the resolved defaults would fill the screen.
            fields["launch"] = {"anyOf": [{"enum": kinds}, *given], "description": launch.get("description", "")}
        if "recipe" in fields:
            fields["recipe"] = {**fields["recipe"], "anyOf": [_named_recipes(), _TEXT, {"type": "null"}]}
    top = schema["properties"]
    top["recipe"] = {"description": top["recipe"]["description"], "anyOf": [_named_recipes(), _TEXT]}
    # What validators read besides the type itself.
    top["refresh"]["additionalProperties"] = {"type": ["string", "number"]}
    known["EvaluateConfig"]["properties"]["require"]["additionalProperties"] = {"type": ["string", "object"]}
    command = known["PreemptionSettings"]["properties"]["command"]
    command["type"] = ["array", "string"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A trainflow pipeline", **schema}


@functools.cache
def argument_schemas() -> dict[str, dict[str, Any]]:
    """The schemas of training arguments that a spec may set, by name."""
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.arguments.fields import declarations, field_hints, field_map

    declared, hints = declarations(TrainingArguments), field_hints(TrainingArguments)
    found: dict[str, dict[str, Any]] = {}
    for name, field in field_map(TrainingArguments).items():
        what = declared[name]
        if what.secret or name in DECIDED or not field.init:
            continue
        schema = _schema_of(name, hints[name], what.choices)
        for bound, keyword in _BOUNDS.items():
            if bound in what.bounds and schema.get("type") in ("integer", "number"):
                schema[keyword] = what.bounds[bound]
        unit = f" ({what.unit})" if what.unit else ""
        schema["description"] = f"{field.metadata.get('help', '')}{unit}"
        found[name] = schema
    return found


def _schema_of(name: str, hint: Any, choices: tuple[Any, ...] | None) -> dict[str, Any]:
    kinds = [kind for kind in typing.get_args(hint) if isinstance(kind, type) and issubclass(kind, enum.Enum)]
    if choices is not None or kinds:
        values = list(choices or ()) + [member.value for kind in kinds for member in kind]
        listed: dict[str, Any] = {"enum": [*dict.fromkeys(values), None]}
        return listed if _refuses_other_texts(name) else {"anyOf": [listed, _TEXT]}
    schema: dict[str, Any] = TypeAdapter(hint).json_schema()
    schema.pop("title", None)
    return schema


def _refuses_other_texts(name: str) -> bool:
    """Whether the argument takes its choices only; some name a function or a package as well."""
    from trainer_lib.arguments import TrainingArguments

    try:
        TrainingArguments.from_dict({name: "none.of.these"})
    except ConfigError:
        return True
    return False


def _named_recipes() -> dict[str, Any]:
    return {"enum": sorted(ABOUT), "description": " ".join(f"{name}: {text}" for name, text in ABOUT.items())}
