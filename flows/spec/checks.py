"""What a spec's fields alone cannot tell: secrets in it, missing files, stores and arguments that do not exist.

No engine and no torch is imported, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.configs import LaunchSettings
from trainer_lib import secrets
from trainer_lib.errors import ConfigError
from trainer_lib.suggestions import nearest

if TYPE_CHECKING:
    from flows.spec.spec import PipelineSpec

# Arguments that the pipeline itself decides, and what to set instead.
_DECIDED = {
    "output_dir": "The stage's folder below 'storage' is used: remove it.",
    "resume_from_checkpoint": "A stage always continues from its own newest checkpoint: remove it.",
}


def refuse_secrets(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for a secret in the spec: its values reach Prefect's database, MLflow and the report."""
    for key, value in _leaves(raw, ""):
        if not isinstance(value, str) or not value:
            continue
        name = key.rsplit(".", 1)[-1]
        variable = secrets.variable_for(name) if secrets.is_secret_name(name) else None
        if variable is None and secrets.holds_known_token(value):
            variable = "HF_TOKEN" if "hf_" in value else "the one its client reads"
        if variable is not None:
            raise ConfigError(
                "A secret has no place in a spec: specs are stored and shown.",
                field=key,
                remedy=f"Remove it here and set the environment variable {variable}.",
            )
        if secrets.is_url_with_password(value):
            raise ConfigError(
                "A URL with a password has no place in a spec: specs are stored and shown.",
                field=key,
                remedy="Remove the user and password and set the client's own environment variables.",
            )


def check_spec(spec: PipelineSpec) -> None:
    """Raises ConfigError for the first thing that would make the run fail later."""
    _check_recipes(spec)
    _check_storage(spec)
    _check_arguments(spec)
    _check_launch("prepare.launch", spec.prepare.launch, {})
    _check_launch("train.launch", spec.train.launch, spec.train.args)
    for name, stage in (("evaluate", spec.evaluate), ("predict", spec.predict)):
        if stage.launch is not None:
            _check_launch(f"{name}.launch", stage.launch, {**spec.train.args, **stage.args})


def _check_recipes(spec: PipelineSpec) -> None:
    from tasks.stage import closure as _closure
    from tasks.stage import sources as _sources

    stages = {"prepare": spec.prepare, "train": spec.train, "evaluate": spec.evaluate, "predict": spec.predict}
    recipes = {"recipe": spec.recipe} | {f"{name}.recipe": s.recipe for name, s in stages.items() if s.recipe}
    for field, recipe in recipes.items():
        _closure.closure(recipe, spec.root, field=field)
    for name, stage in stages.items():
        field, recipe = (f"{name}.recipe", stage.recipe) if stage.recipe else ("recipe", spec.recipe)
        function = "prepare" if name == "prepare" else "build_model"
        names = _closure.top_level_names(Path(recipe))
        if names is not None and function not in names:
            raise ConfigError(
                f"There is no function '{function}' in it.",
                field=field,
                value=recipe,
                remedy=f"Define {function}; docs/recipes.md shows its arguments.",
            )
    _sources.check(spec.prepare.sources)


def _check_storage(spec: PipelineSpec) -> None:
    from trainer_lib.storage import Store

    store = Store.open(spec.storage, field="storage")
    if store.is_local:
        folder = store.local_path()
        if folder.exists() and not folder.is_dir():
            raise ConfigError("A file, not a folder.", field="storage", value=spec.storage, remedy="Choose a folder.")
    if spec.publish.enabled and spec.publish.to and not spec.publish.to.startswith("hf://"):
        Store.open(spec.publish.to, field="publish.to")
    if not spec.storage.startswith("memory://"):
        return
    kinds = {"prepare": spec.prepare.launch, "train": spec.train.launch}
    kinds |= {
        "evaluate": spec.evaluate.launch or spec.train.launch,
        "predict": spec.predict.launch or spec.train.launch,
    }
    for name, launch in kinds.items():
        if launch.kind != "in_process":
            raise ConfigError(
                "memory:// lives inside one process, and the stages run in processes of their own.",
                field="storage",
                value=spec.storage,
                remedy=f"Choose a folder or another store, or set {name}.launch=in_process.",
            )


def _check_arguments(spec: PipelineSpec) -> None:
    from trainer_lib.arguments import TrainingArguments

    for stage, args in (("train", spec.train.args), ("evaluate", spec.evaluate.args), ("predict", spec.predict.args)):
        for name, remedy in _DECIDED.items():
            if args.get(name) is not None:
                raise ConfigError(
                    "The pipeline decides this.", field=f"{stage}.args.{name}", value=args[name], remedy=remedy
                )
        merged = {**spec.train.args, **args}
        arguments = TrainingArguments.from_dict(merged, prefix=f"{stage}.args")
        if stage == "train" and str(arguments.eval_strategy) != "no" and spec.train.eval_split is None:
            raise ConfigError(
                "Evaluation while training is asked for, but no split is named.",
                field="train.eval_split",
                remedy="Set train.eval_split=validation (a split that prepare makes), or train.args.eval_strategy=no.",
            )


def _check_launch(field: str, settings: LaunchSettings, args: Mapping[str, Any]) -> None:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.launch import check, from_settings

    if field != "train.launch" and (str(settings.nodes) != "1" or settings.kind == "environment"):
        name = "nodes" if str(settings.nodes) != "1" else "kind"
        raise ConfigError(
            "Several machines train; the other stages run on one.",
            field=f"{field}.{name}",
            value=getattr(settings, name),
            remedy="Remove it here.",
        )
    use_cpu = TrainingArguments.from_dict(args).use_cpu
    try:
        check(from_settings(settings.model_dump()), use_cpu=use_cpu)
    except ConfigError as error:
        if error.field is not None and error.field.startswith("train.launch."):
            error.field = f"{field}.{error.field.rsplit('.', 1)[-1]}"
        raise


def check_splits(spec: PipelineSpec, prepared: Collection[str]) -> None:
    """Raises ConfigError for a split that a later stage names and `prepare` has not made."""
    named = [("train.train_split", spec.train.train_split), ("train.eval_split", spec.train.eval_split)]
    if spec.evaluate.enabled:
        named += [("evaluate.splits", split) for split in spec.evaluate.splits]
    if spec.predict.enabled:
        named.append(("predict.split", spec.predict.split))
    for field, split in named:
        if split is None or split in prepared:
            continue
        near = nearest(split, list(prepared))
        raise ConfigError(
            "There is no such split in the prepared data.",
            field=field,
            value=split,
            remedy=(f"Did you mean '{near}'? " if near else "") + f"Prepared were: {', '.join(prepared)}.",
        )


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{index}")
    else:
        yield key, value
