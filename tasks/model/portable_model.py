"""A trained model as it is published: its description, and its files, with `publish.merge_adapters` merged weights."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from trainer_lib.errors import CodeError, ConfigError
from trainer_lib.hub.base import ADAPTER, Source
from trainer_lib.model_folder.description import ASSETS, CODE, FILE, SOURCE, ModelDescription, Places
from trainer_lib.protocol.requests import MergeRequest
from trainer_lib.secrets import holds_token
from trainer_lib.storage import FileEntry, Store
from trainflow.tasks.code.closure import Closure
from trainflow.tasks.configs import LaunchSettings, PublishConfig
from trainflow.tasks.keys.keys import versions
from trainflow.tasks.keys.stage_code import METRICS, code_of
from trainflow.tasks.keys.stage_code import MODEL as MODEL_FUNCTIONS
from trainflow.tasks.model.model_lineage import key_fields
from trainflow.tasks.stage import progress as _progress
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.runner import StageAttempt, StageFolder
from trainflow.tasks.stage.worker import launch_request, model_fields, sent_arguments

MODEL = "model/"
_ASSETS = f"{ASSETS}/"
ADAPTER_CONFIG = "adapter_config.json"
_OF_ADAPTERS = (ADAPTER_CONFIG, "adapter_model.safetensors", "base_model.json")
# Arguments that say where to write and report: they decide no prediction.
_ELSEWHERE = ("output_dir", "logging_dir", "report_to", "run_name", "hub_model_id", "hub_token", "push_to_hub")
_MERGED = "merged"  # folder of the stage that holds the merged weights until they are published


@dataclass(frozen=True)
class TrainedModel:
    """A description and the bytes of the code that it lists, as they are now."""

    description: ModelDescription
    code: dict[str, bytes]


def describe_model(
    config: PublishConfig, context: StageContext, data: StageManifest[PrepareFacts], model: StageManifest[TrainFacts]
) -> TrainedModel:
    """The description of a trained model; `config` names the recipe, the options and the arguments that predict."""
    recipe = Path(config.recipe or context.recipe).absolute()
    fallback = Path(context.recipe).absolute() if config.recipe and config.recipe != context.recipe else None
    closure = context.resolver.closure(recipe, context.root, fallback=fallback)
    _require_same_model(config, context, model)
    code = {name: path.read_bytes() for name, path in closure.paths.items()}
    columns: dict[str, str] = {}
    for split in data.facts.splits.values():  # splits may have columns of their own, such as labels
        columns |= split.columns
    columns |= data.facts.info.get("new_columns") or {}
    private = {f"{_ASSETS}{name}" for name in data.facts.info.get("unpublished", ())}
    description = ModelDescription(
        name=context.name,
        recipe=closure.name_of(recipe),
        fallback=None if fallback is None else closure.name_of(fallback),
        paths=_module_path(closure, code),
        code=tuple(
            FileEntry(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in sorted(code.items())
        ),
        weights=tuple(
            FileEntry(entry.path.removeprefix(MODEL), entry.size, entry.sha256)
            for entry in model.files
            if entry.path.startswith(MODEL)
        ),
        assets=tuple(entry for entry in data.files if entry.path.startswith(_ASSETS) and entry.path not in private),
        model=model.facts.model,
        options=config.options,
        args={name: value for name, value in sent_arguments(config.args, context).items() if name not in _ELSEWHERE},
        info=data.facts.info,
        rows={name: split.rows for name, split in data.facts.splits.items()},
        columns=columns,
        stages={result.stage: result.key for result in (data, model)},
        versions=versions(),
    )
    return TrainedModel(description, code)


def _require_same_model(config: PublishConfig, context: StageContext, model: StageManifest[TrainFacts]) -> None:
    """Raise CodeError when code that builds the model was edited since train: it would load other weights wrongly."""
    known = key_fields(model).get("recipe") or {}
    code = code_of(config, context)
    # A digest of the order of statements is that of all statements that train reached, with or without metrics.
    now = [code.reach(functions).digests for functions in (MODEL_FUNCTIONS, (*MODEL_FUNCTIONS, *METRICS))]
    built = code.reach(("build_model",)).digests.keys() & known.keys()
    changed = sorted(label for label in built if known[label] not in [digests.get(label) for digests in now])
    if changed:
        what = f"Code that builds the model changed after it was trained: {', '.join(changed)}."
        remedy = "Run the same command again: it trains the changed model. Or put the code back."
        raise CodeError(what, field="recipe", value=config.recipe or context.recipe, remedy=remedy)


def refuse_tokens(code: Mapping[str, bytes]) -> None:
    """Raise ConfigError for code that is about to be published with a token in it."""
    for name, content in sorted(code.items()):
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            if holds_token(line):
                what = "The code would be published with the model, and this line holds a token or a password."
                remedy = "Read it from an environment variable, or set publish.code=false."
                raise ConfigError(what, field="publish.code", value=f"{name}:{number}", remedy=remedy)


def code_texts(trained: TrainedModel) -> dict[str, bytes]:
    """The files of the code, by their path in a publication."""
    return {f"{CODE}/{name}": content for name, content in trained.code.items()}


def write_description(
    config: PublishConfig,
    context: StageContext,
    data: StageManifest[PrepareFacts],
    model: StageManifest[TrainFacts],
    run: Store,
) -> TrainedModel:
    """Write the description into a run's folder, ``<storage>/runs/<run>``, whose `source` holds the recipe's files.

    The other files stay where the stages wrote them. Returns the description as a publication would have it.
    """
    root = Store.open(context.storage).url.rstrip("/")

    def place(manifest: StageManifest[Any], below: str) -> str:
        inside = manifest.url.rstrip("/").removeprefix(f"{root}/")
        return f"../../{inside}{below}"

    trained = describe_model(config, context, data, model)
    for name, content in trained.code.items():
        run.write_bytes(f"{SOURCE}/{name}", content)
    places = Places(weights=place(model, "/model"), code=SOURCE, data=place(data, ""))
    run.write_bytes(FILE, replace(trained.description, places=places).to_json())
    return trained


def _module_path(closure: Closure, names: Iterable[str]) -> tuple[str, ...]:
    """The folders that imports start from, from the folder of the code."""
    inside = [
        place.relative_to(closure.root).as_posix() for place in closure.places if place.is_relative_to(closure.root)
    ]
    # A file from outside of the root is named by the place that it was imported from.
    outside = [name.partition("/")[0] for name in sorted(names) if name.startswith("(") and "/" in name]
    used = [place for place in inside if place == "." or any(name.startswith(f"{place}/") for name in names)]
    return tuple(dict.fromkeys([*used, *outside]))


def require_adapters(config: PublishConfig, model: StageManifest[TrainFacts]) -> None:
    """Raise ConfigError where the spec merges adapters and the trained model has none."""
    if not config.merge_adapters or f"{MODEL}{ADAPTER_CONFIG}" in {entry.path for entry in model.files}:
        return
    remedy = "Remove it: all weights of the model are published. Or train adapters: train.model.adapter."
    raise ConfigError("The trained model has no adapters.", field="publish.merge_adapters", value="true", remedy=remedy)


@contextlib.contextmanager
def published_model(
    config: PublishConfig,
    context: StageContext,
    data: StageManifest[PrepareFacts],
    model: StageManifest[TrainFacts],
    attempt: StageAttempt,
) -> Iterator[tuple[dict[str, Source], dict[str, float]]]:
    """The files of the model by their path in a publication, and how merged weights agree with the adapters.

    Merged weights exist inside the block.
    """
    trained = {
        entry.path.removeprefix(MODEL): Source(model.store(), entry)
        for entry in model.files
        if entry.path.startswith(MODEL)
    }
    if not config.merge_adapters:
        yield trained, {}
        return
    store = attempt.store.child(_MERGED)
    store.delete_tree()  # of an attempt that was killed
    try:
        message = "merges the adapters into the weights of their base model"
        _progress.publish({"event": "progress", "stage": attempt.stage, "message": message})
        request = MergeRequest(
            **model_fields(config, context, StageFolder(attempt.stage, store), data),
            args=sent_arguments({**config.args, "use_cpu": True}, context),
            model=model.facts.model,
            model_url=f"{model.url}/model",
            dtype=config.merged_type,
            tolerance=config.merge_tolerance,
        )
        result = launch_request(request, LaunchSettings(processes=1), context, attempt)
        if result.agreement:
            words = "merged weights choose the next token of the adapters in {merge_agreement:.1%} of the places tried"
            message = words.format(**result.agreement)
            _progress.publish({"event": "progress", "stage": attempt.stage, "message": message})
        # The adapters in a separate folder: next to merged weights, transformers would put them on these once more.
        moved = {path: f"{ADAPTER}/{path}" if PurePosixPath(path).name in _OF_ADAPTERS else path for path in trained}
        files = {moved[path]: source for path, source in trained.items()}
        yield files | {entry.path: Source(store, entry) for entry in result.files}, result.agreement
    finally:
        store.delete_tree()
