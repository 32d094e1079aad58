"""Checks beyond a spec's fields: secrets, missing files, stores and arguments that do not exist.

No engine and no torch is imported, and nothing is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib import secrets
from trainer_lib.base.durations import describe
from trainer_lib.base.metric_names import read_metrics
from trainer_lib.base.paths import expand_home
from trainer_lib.base.suggestions import nearest, require_known, suggestion
from trainer_lib.errors import ConfigError
from trainer_lib.protocol.recipe_functions import INSTEAD, check_definitions, find_returned_names
from trainer_lib.protocol.recipe_names import ABOUT, recipe_name
from trainer_lib.protocol.requests import PreparedSplit
from trainflow.tasks.keys.keys import refuse_project_modules
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.settings import check_benchmarks, check_runner

if TYPE_CHECKING:
    from trainflow.flows.spec.spec import PipelineSpec
    from trainflow.flows.stages import Stage

MOST_BYTES = 400_000
"""The largest spec: Prefect's servers refuse parameters above 512 KiB."""


def check_adapters(spec: PipelineSpec) -> None:
    """Refuse to merge adapters that a recipe by name does not train; of other recipes the trained model tells."""
    if not (spec.publish.enabled and spec.publish.merge_adapters):
        return
    if recipe_name(spec.recipe) in ABOUT and not spec.train.model.get("adapter"):
        what = "The spec trains no adapters, so there are none to merge."
        remedy = "Remove it: all weights of the model are published. Or add train.model.adapter={kind: lora}."
        raise ConfigError(what, field="publish.merge_adapters", value="true", remedy=remedy)


_TRACKING_SCHEMES = {
    "file",
    "http",
    "https",
    "sqlite",
    "postgresql",
    "mysql",
    "mssql",
    "databricks",
    "databricks-uc",
    "uc",
}

DECIDED = {
    "output_dir": "The stage's folder below 'storage' is used: remove it.",
    "resume_from_checkpoint": "A stage always continues from its own newest checkpoint: remove it.",
}


def all_stages() -> tuple[Stage, ...]:
    """The rows of the stage table."""
    from trainflow.flows import stages  # it brings the storage and the trackers, which a spec does not need

    return stages.all_stages()


def refuse_secrets(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for a secret in the spec: its values reach Prefect's database, MLflow and the report."""
    for key, value in _leaves(raw, ""):
        if not isinstance(value, str) or not value:
            continue
        around, _, name = key.rpartition(".")
        # Variables are named by habit: MY_TOKEN is one of these, an option `deployment_token` may be anything.
        surely = secrets.may_be_secret_name if around.endswith(".env") else secrets.is_secret_name
        variable = secrets.variable_for(name) if surely(name) else None
        in_url = secrets.holds_password_in_url(value)
        if variable is None and not in_url and secrets.holds_secret(value):
            # A known token is refused under any name: `options.note=hf_...` leaks it just as well.
            variable = "HF_TOKEN" if "hf_" in value else "that its client reads"
        if variable is not None:
            remedy = f"Remove it here and set the environment variable {variable}."
            raise ConfigError("A secret has no place in a spec: specs are stored and shown.", field=key, remedy=remedy)
        if in_url:
            what = "A URL with a password has no place in a spec: specs are stored and shown."
            remedy = "Remove the user and password and set the client's own environment variables."
            raise ConfigError(what, field=key, remedy=remedy)


def check_spec(spec: PipelineSpec, resolver: Resolver) -> None:
    """Raise ConfigError for the first thing that would make the run fail later, and shows without running anything."""
    _check_size(spec)
    _check_recipes(spec, resolver)
    _check_storage(spec)
    _check_refresh(spec)
    _check_tracking(spec)
    _check_arguments(spec, resolver)
    _check_launches(spec, resolver)
    _check_metrics(spec)
    if spec.evaluate.enabled:
        recipe = recipe_name(spec.evaluate.recipe or spec.recipe)
        check_benchmarks(spec.evaluate.benchmarks, spec.benchmark_tasks, splits=spec.evaluate.splits, recipe=recipe)
    _check_gates(spec)
    _check_comparisons(spec, resolver)
    check_adapters(spec)
    spec.notify.check()


def _check_size(spec: PipelineSpec) -> None:
    size = len(json.dumps(spec.model_dump(mode="json")))
    if size > MOST_BYTES:
        what = f"The spec has {size:,} bytes with its defaults; Prefect takes at most {MOST_BYTES:,} of a run."
        remedy = "Name files by patterns (data/*.parquet) in place of one by one, and move tables into a file of data."
        raise ConfigError(what, field="spec", value=spec.name, remedy=remedy)


def _check_recipes(spec: PipelineSpec, resolver: Resolver) -> None:
    from trainflow.tasks.code.syntax import top_level_names

    if spec.root is not None and not Path(spec.root).is_dir():
        remedy = "Give the folder that the recipe's imports start from, or leave it out."
        raise ConfigError("There is no such folder.", field="root", value=spec.root, remedy=remedy)
    # Also without a stage that uses it: the record keeps the pipeline's recipe.
    resolver.closure(spec.recipe, spec.root)
    for stage in all_stages():
        own = getattr(stage.config(spec), "recipe", None)
        field, recipe = (f"{stage.section}.recipe", own) if own else ("recipe", spec.recipe)
        # Functions of evaluate that cannot be called would otherwise fail after the training.
        files = resolver.closure(recipe, spec.root, field=field)
        if (tree := files.trees.get(files.name_of(Path(recipe)))) is not None:
            check_definitions(tree, field=field, value=recipe)
        # What a stage's own file lacks is taken from the pipeline's. None: a star import may define anything.
        names = [top_level_names(Path(path)) for path in {recipe, spec.recipe}]
        wanted = {stage.recipe_function, INSTEAD.get(str(stage.recipe_function))}
        missing = all(defined is not None and not wanted & set(defined) for defined in names)
        if stage.recipe_function is not None and missing:
            what = f"The recipe has no function '{stage.recipe_function}'."
            remedy = f"Define {stage.recipe_function}; docs/recipes/own.md shows its arguments."
            raise ConfigError(what, field=field, value=recipe, remedy=remedy)
    resolver.check_sources(spec.prepare.sources)


def _check_storage(spec: PipelineSpec) -> None:
    from trainer_lib.hub.base import parse_target
    from trainer_lib.storage import Store
    from trainer_lib.storage.urls import checked_address

    _refuse_read_only(spec.storage, "storage")
    store = Store.open(spec.storage, field="storage")
    if store.is_local:
        folder = store.local_path()
        if folder.exists() and not folder.is_dir():
            raise ConfigError(
                "The storage is a file, not a folder.", field="storage", value=spec.storage, remedy="Choose a folder."
            )
    # Opening a store checks the form of its URL; nothing is read.
    if spec.publish.enabled and spec.publish.to:
        target = parse_target(spec.publish.to, revision=spec.publish.revision)
        if target.repo is not None and (endpoint := os.environ.get("HF_ENDPOINT")):
            checked_address(endpoint, field="HF_ENDPOINT", unset="huggingface.co")
        if target.repo is None:
            _refuse_read_only(target.url, "publish.to")
            Store.open(target.url, field="publish.to")
    if not spec.storage.startswith("memory://"):
        return
    for stage in all_stages():
        launch = getattr(stage.config(spec), "launch", None)
        if launch is not None and launch.kind != "in_process":
            what = "A memory:// storage exists inside one process, and stages run in other processes."
            remedy = f"Choose a folder or another store, or set {stage.section}.launch=in_process."
            raise ConfigError(what, field="storage", value=spec.storage, remedy=remedy)


def _check_refresh(spec: PipelineSpec) -> None:
    """Refuse an age of what is not a stage, or two of one stage."""
    stages = {name: stage for stage in all_stages() for name in (stage.section, stage.name)}
    for name, age in spec.refresh.items():
        field = f"refresh.{name}"
        require_known(name, stages, "This stage does not exist.", field=field, value=describe(age))
        stage = stages[name]
        if stage.name != stage.section and {stage.name, stage.section} <= set(spec.refresh):
            what = f"The stage {stage.name} is named twice."
            raise ConfigError(what, field=field, value=describe(age), remedy=f"Keep refresh.{stage.section}.")


def _check_tracking(spec: PipelineSpec) -> None:
    """Refuse the address of a tracking server whose scheme MLflow does not know; nothing is asked over the network."""
    uri = spec.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    scheme, separator, _ = uri.partition("://")
    if not spec.tracking.enabled or not separator:
        return
    from importlib import metadata

    plugins = {point.name for point in metadata.entry_points(group="mlflow.tracking_store")}
    # "mysql+pymysql" names a driver as well.
    if scheme.partition("+")[0] not in _TRACKING_SCHEMES | plugins:
        field = "tracking.uri" if spec.tracking.uri else "MLFLOW_TRACKING_URI"
        remedy = "Give a server (http://host:5000), a database (sqlite:////path/mlflow.db) or a folder."
        raise ConfigError(f"MLflow knows no scheme '{scheme}'.", field=field, value=uri, remedy=remedy)


def _refuse_read_only(url: str, field: str) -> None:
    """Refuse the address of a web server, which takes no files: the stage would fail after all that comes before it."""
    if url.lower().startswith(("http://", "https://")):
        what = "Files can be read from this kind of address, and none can be written."
        remedy = "Give a folder, s3://bucket/path or another store; the server of an S3 store is AWS_ENDPOINT_URL."
        raise ConfigError(what, field=field, value=url, remedy=remedy)


def _check_arguments(spec: PipelineSpec, resolver: Resolver) -> None:
    """Check arguments, and what is in the files that some of them name."""
    from trainer_lib.arguments.coerce import read_mapping
    from trainer_lib.arguments.validation import FILE_FIELDS

    for stage in all_stages():
        config = stage.config(spec)
        if not hasattr(config, "args"):
            continue
        for name, remedy in DECIDED.items():
            if config.args.get(name) is not None:
                what = "The pipeline decides this argument."
                raise ConfigError(what, field=f"{stage.section}.args.{name}", value=config.args[name], remedy=remedy)
        prefix = f"{stage.section}.args"
        args = resolver.arguments(config.args, prefix=prefix)
        for name in FILE_FIELDS:
            if isinstance(file := getattr(args, name), str):
                content = read_mapping(expand_home(file), field=f"{prefix}.{name}")
                resolver.arguments({**config.args, name: content}, prefix=prefix)
    train = resolver.arguments(spec.train.args)
    if str(train.eval_strategy) != "no" and spec.train.eval_split is None:
        what = "Evaluation while training is switched on, but no split is named."
        remedy = "Set train.eval_split=validation (a split that prepare makes), or train.args.eval_strategy=no."
        raise ConfigError(what, field="train.eval_split", remedy=remedy)


def _check_launches(spec: PipelineSpec, resolver: Resolver) -> None:
    from trainer_lib.storage import Store
    from trainflow.tasks.code.syntax import top_level_names

    for stage in all_stages():
        config = stage.config(spec)
        settings = getattr(config, "launch", None)
        if settings is None:
            continue
        field = f"{stage.section}.launch"
        # `nodes` may be a range ("2:4"), so it is compared as text.
        several = "nodes" if str(settings.nodes) != "1" else "kind" if settings.kind == "environment" else None
        if several and not stage.several_machines:
            what = "Only train runs on several machines; the other stages run on one."
            value = getattr(settings, several)
            raise ConfigError(what, field=f"{field}.{several}", value=value, remedy="Remove it here.")
        use_cpu = hasattr(config, "args") and resolver.arguments(config.args).use_cpu
        resolver.launch(settings, use_cpu=use_cpu, section=stage.section)
        needs_folder = settings.engine == "slurm" and "folder" not in settings.engine_options
        if needs_folder and not Store.open(spec.storage, field="storage").is_local:
            what = "Slurm writes what a job prints into a folder, and this storage is not one."
            remedy = f"Name a folder that all machines of the cluster see: {field}.engine_options.folder."
            raise ConfigError(what, field="storage", value=spec.storage, remedy=remedy)
    if spec.prepare.runner is not None:
        defined = [top_level_names(Path(path)) for path in {spec.prepare.recipe or spec.recipe, spec.recipe}]
        is_sharded = any(names is None or "prepare_shard" in names for names in defined)
        check_runner(spec.prepare.runner, spec.prepare.launch, is_sharded=is_sharded)


def _check_metrics(spec: PipelineSpec) -> None:
    calls = read_metrics(spec.evaluate.metrics)
    recipes = {Path(recipe).parent for recipe in (spec.evaluate.recipe, spec.recipe) if recipe}
    roots = [] if spec.root is None else [Path(spec.root), Path(spec.root) / "src"]
    refuse_project_modules(calls, [*roots, *recipes])


def _check_gates(spec: PipelineSpec) -> None:
    """Refuse gates that nothing could pass, and a run that would go around them."""
    config = spec.evaluate
    guarded = [stage for stage in all_stages() if stage.gated and stage.is_enabled(spec)]
    if config.require and guarded and not config.enabled:
        what = f"The spec requires something of the evaluation (evaluate.require), which {guarded[0].name} waits for."
        remedy = f"Leave evaluate on, or switch {guarded[0].section} off as well."
        raise ConfigError(what, field="evaluate.enabled", value=False, remedy=remedy)
    tasks = spec.benchmark_tasks
    for metric in config.require:
        if not any(metric.startswith(f"{split}_") for split in (*config.splits, "overall", *tasks)):
            raise names_no_split(
                metric, [*config.splits, *tasks], field=f"evaluate.require.{metric}", value=config.require[metric]
            )


def _check_comparisons(spec: PipelineSpec, resolver: Resolver) -> None:
    """Refuse a metric for a comparison of models that no evaluation can give: it would fail after the training."""
    if spec.register.flavor is not None and spec.register.name is None:
        what = "A flavor is for versions in the registry, and the spec registers no model."
        remedy = "Set register.name, or remove the flavor."
        raise ConfigError(what, field="register.flavor", value=spec.register.flavor, remedy=remedy)
    if spec.publish.enabled and spec.publish.only_if == "better" and spec.publish.metric is None:
        what = "Models are compared by a metric, and the spec names none."
        remedy = "Name it: publish.metric=test_accuracy."
        raise ConfigError(what, field="publish.metric", remedy=remedy)
    published = spec.publish.compared_by if spec.publish.enabled else None
    for field, metric in (("register.metric", spec.register.compared_by), ("publish.metric", published)):
        if metric is not None:
            _check_compared(spec, resolver, field, metric)


def _check_compared(spec: PipelineSpec, resolver: Resolver, field: str, metric: str) -> None:
    config = spec.evaluate
    if not config.enabled:
        what = "The models are compared by what evaluate measures, which the spec leaves out."
        raise ConfigError(what, field=field, value=metric, remedy="Leave evaluate on, or remove the metric.")
    split = next((split for split in config.splits if metric.startswith(f"{split}_") and metric != f"{split}_"), None)
    if split is None:
        raise names_no_split(metric, config.splits, field=field, value=metric)
    measured = find_measured(spec, resolver)
    names = [f"{part}_{name}" for part in config.splits for name in measured or ()]
    if measured is not None and metric not in names:
        what = "compute_metrics returns no such metric."
        if not measured:
            what = "The recipe has no compute_metrics to measure it."
        remedy = suggestion(metric, names) if names else "Define compute_metrics, and return it from there."
        raise ConfigError(what, field=field, value=metric, remedy=remedy)


def find_measured(spec: PipelineSpec, resolver: Resolver) -> list[str] | None:
    """The names that the recipe's compute_metrics returns; None where that is known only when it runs."""
    from trainflow.tasks.code.syntax import top_level_names

    calls = read_metrics(spec.evaluate.metrics)
    if any(call.module is not None for call in calls):  # some return several numbers
        return None
    named = [call.result for call in calls]
    for recipe in dict.fromkeys((spec.evaluate.recipe or spec.recipe, spec.recipe)):
        defined = top_level_names(Path(recipe))
        files = resolver.closure(recipe, spec.root)
        tree = files.trees.get(files.name_of(Path(recipe)))
        if defined is None or tree is None:
            return None
        if "compute_metrics" in defined:
            names = find_returned_names(tree, "compute_metrics")
            # The Trainer takes its prefix off those that have it already.
            return None if names is None else [*(name.removeprefix("eval_") for name in names), *named]
    return named


def names_no_split(metric: str, splits: Sequence[str], *, field: str, value: str) -> ConfigError:
    """The error of a metric whose name begins with that of no split."""
    options = [f"{split}_{metric.partition('_')[2] or metric}" for split in splits]
    options += [f"{split}_{metric}" for split in splits]
    what = "The name of a metric begins with that of a split in evaluate.splits."
    remedy = f"Did you mean '{nearest(metric, options) or options[-1]}'?"
    return ConfigError(what, field=field, value=value, remedy=remedy)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{index}")
    else:
        yield key, value


def check_splits(spec: PipelineSpec, prepared: Mapping[str, PreparedSplit]) -> None:
    """Raise ConfigError for a split that a later stage names and that was not prepared, or a column to measure by."""
    named = [
        (f"{stage.section}.{setting}", split)
        for stage in all_stages()
        if stage.is_enabled(spec)
        for setting, splits in stage.splits(stage.config(spec)).items()
        for split in splits
    ]
    for field, split in named:
        if split in prepared:
            continue
        near = nearest(split, list(prepared))
        remedy = (f"Did you mean '{near}'? " if near else "") + f"Prepared were: {', '.join(prepared)}."
        raise ConfigError("The prepared data has no such split.", field=field, value=split, remedy=remedy)
    for column in spec.evaluate.slices if spec.evaluate.enabled else ():
        for split in spec.evaluate.splits:
            what = f"The rows of the split '{split}' have no such column."
            require_known(column, prepared[split].columns, what, field="evaluate.slices")
