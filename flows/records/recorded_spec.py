"""The spec of a recorded run, made to work on this machine.

    <storage>/runs/<id>/spec.yaml       as it was resolved, overrides included
    <storage>/runs/<id>/source/         the recipe's files

Where the project is on this machine, its recipe is used as it is now. Where it is not, the files that the run kept are
copied to this user's cache, and compared with the digests in the record. A source of the data that is not here counts
as what it was: prepared data that is committed needs no source.

The lineage of a run, what was made from what and where it was published, is written as `lineage.json` when it ends. For
a run without one, which has not ended or is older, it is made from what the stages have committed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.model_folder.description import FILE as MODEL_FILE
from trainer_lib.model_folder.description import SOURCE
from trainer_lib.model_folder.lineage import FILE, Lineage, StageLink
from trainer_lib.protocol.recipe_names import FOLDER
from trainer_lib.storage import FileEntry, Store, relative_problem
from trainflow.flows.records.past_runs import ARGUMENTS_FILE, KEYS_FILE, SPEC_FILE, PastRun, run_folder
from trainflow.flows.spec.spec import PipelineSpec, parse_spec
from trainflow.flows.stages import all_stages, stage_names
from trainflow.tasks.keys import sources as _sources
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.model.model_lineage import describe_lineage
from trainflow.tasks.stage.manifest import look_up_in, read_key_fields

_SPEC_BYTES = 1 << 20
_GONE = {"evaluate": ("rows_per_range",)}
"""Settings, by their section, that recorded specs have with their defaults and that no spec takes any more."""
_SOURCE_BYTES = 64 << 20
_KEPT = (SPEC_FILE, ARGUMENTS_FILE, KEYS_FILE, MODEL_FILE)


def read_recorded_spec(storage: str, run: PastRun, say: Callable[[str], object]) -> PipelineSpec:
    """The spec of a run below `storage`, checked, with its recipe as files of this machine.

    Raises ConfigError if the spec is gone or torn, or the recipe is neither here nor whole in the storage; `say` gets a
    line where the recipe is not the project's own.
    """
    raw = read_spec_record(storage, run)
    store = Store.open(storage)
    raw = {**raw, "storage": str(store.local_path()) if store.is_local else store.url}
    spec = parse_spec(raw)
    if not all(Path(path).is_file() for path in _recipes(spec)):
        spec = _with_kept_recipe(storage, run, spec).recorded_as(raw)
        say(f"The project is not on this machine. The recipe is the one that the run kept: {spec.recipe}")
    resolver = Resolver()
    resolver.assume_sources(_recorded_sources(storage, run, spec))
    spec = spec.with_resolver(resolver)
    spec.check()
    return spec


def read_kept_spec(storage: str, run: PastRun, say: Callable[[str], object]) -> PipelineSpec:
    """The spec of a run with the recipe of that time: the project's own if it is unchanged, else what the run kept.

    It is not checked; otherwise as `read_recorded_spec`.
    """
    spec = parse_spec(read_spec_record(storage, run))
    # A recipe by name is the installed one: what recipes share is not part of a copy.
    is_named = all(Path(path).parent == FOLDER for path in _recipes(spec))
    if not is_named and not _is_unchanged(spec, run):
        spec = _with_kept_recipe(storage, run, spec)
        say(f"The recipe is the one that the run kept: {spec.recipe}")
    return spec.with_resolver(Resolver())


def _is_unchanged(spec: PipelineSpec, run: PastRun) -> bool:
    """Whether the project's files are those that the run kept."""
    if not run.sources or not all(Path(path).is_file() for path in _recipes(spec)):
        return False
    closures = (spec.resolver.closure(recipe, spec.root) for recipe in _recipes(spec))
    files = {name: path for closure in closures for name, path in closure.paths.items()}
    return run.sources == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def read_spec_record(storage: str, run: PastRun) -> dict[str, Any]:
    """The spec that a run recorded, as plain data. Raises ConfigError if it is gone or torn."""
    from trainer_lib.base.yaml_text import YamlProblem, parse_yaml

    data = run_folder(storage, run.id).read_if_exists(SPEC_FILE, limit=_SPEC_BYTES)
    what = "is gone from the storage"
    try:
        raw = None if data is None else parse_yaml(data.decode())
    except (YamlProblem, UnicodeDecodeError):
        raw, what = None, "cannot be read"
    if isinstance(raw, dict):
        for section, names in _GONE.items():
            raw[section] = {name: value for name, value in (raw.get(section) or {}).items() if name not in names}
        return raw
    remedy = "Run the spec itself, which continues as well: trainflow run SPEC."
    raise ConfigError(f"The spec that was recorded with this run {what}.", field="RUN", value=run.id, remedy=remedy)


def _recipes(spec: PipelineSpec) -> list[str]:
    own = [getattr(stage.config(spec), "recipe", None) for stage in all_stages()]
    return [spec.recipe, *(path for path in own if path)]


def _with_kept_recipe(storage: str, run: PastRun, spec: PipelineSpec) -> PipelineSpec:
    """The spec with the recipe's files that the run kept."""
    root = Path(spec.root or Path(spec.recipe).parent)
    recipes = _recipes(spec)
    # Where all are there, they have changed since.
    missing = next((path for path in recipes if not Path(path).is_file()), recipes[0])
    folder = _copy_sources(storage, run, missing=missing)

    def here(path: str) -> str:
        # As `trainflow.tasks.code.closure` names the files of a recipe.
        if Path(path).parent == FOLDER:
            return path
        return str(folder / (Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path(path).name))

    changed: dict[str, Any] = {"recipe": here(spec.recipe), "root": str(folder)}
    for name in type(spec).model_fields:
        section = getattr(spec, name)
        if getattr(section, "recipe", None):
            changed[name] = section.model_copy(update={"recipe": here(section.recipe)})
    return spec.model_copy(update=changed)


def _copy_sources(storage: str, run: PastRun, *, missing: str) -> Path:
    """The folder of this machine with the recipe's files that the run kept."""
    kept = run_folder(storage, run.id).child("source")
    contents: dict[str, bytes] = {}
    problems: list[str] = [] if run.sources else ["none were kept"]
    for name, digest in sorted(run.sources.items()):
        data = None if relative_problem(name) else kept.read_if_exists(name, limit=_SOURCE_BYTES)
        if data is None or hashlib.sha256(data).hexdigest() != digest:
            problems.append(f"{name} is {'missing' if data is None else 'not as it was kept'}")
        else:
            contents[name] = data
    if problems:
        what = f"The recipe is not on this machine, and its files in {kept.url} are not whole: {'; '.join(problems)}."
        remedy = "Copy the project to the same place on this machine."
        raise ConfigError(what, field="recipe", value=missing, remedy=remedy)
    identity = "\n".join(f"{name} {digest}" for name, digest in sorted(run.sources.items()))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "trainflow" / "sources" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in contents.items():
            path = folder / name
            # A file that was edited in the cache is put back; another command may be reading the same one.
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
                draft.write_bytes(data)
                draft.replace(path)
    except OSError as error:
        what = f"The recipe's files cannot be written: {error.strerror}."
        remedy = "Set XDG_CACHE_HOME to a folder that you may write."
        raise StorageError(what, field="XDG_CACHE_HOME", value=str(folder), remedy=remedy) from error
    return folder


def _recorded_sources(storage: str, run: PastRun, spec: PipelineSpec) -> dict[str, dict[str, str]]:
    """Source of the spec that is not on this machine -> its label and digest when the run prepared the data."""
    absent = _sources.find_absent(spec.prepare.sources)
    key = run.stages.get("prepare-data")
    if not absent or key is None:  # the check of the spec names what is absent
        return {}
    fields = read_key_fields(storage, "prepare-data", key) or {}
    recorded = fields.get("sources")
    if not isinstance(recorded, list) or len(recorded) != len(spec.prepare.sources):
        return {}
    return {source: found for source, found in zip(spec.prepare.sources, recorded, strict=True) if source in absent}


# -- lineage -----------------------------------------------------------------------------------------------------------


def write_lineage(storage: str, folder: Store, record: Mapping[str, Any]) -> None:
    """Write the lineage of a run that has ended into its folder; `record` is its `run.json`. Raises StorageError."""
    kept = [info for info in folder.list() if info.path in _KEPT or info.path.startswith(f"{SOURCE}/")]
    files = tuple(FileEntry(info.path, info.size, folder.digest(info.path)) for info in kept)
    folder.write_bytes(FILE, compose_lineage(storage, folder, record, files=files).to_json())


def compose_lineage(
    storage: str, folder: Store, record: Mapping[str, Any], *, files: tuple[FileEntry, ...] = ()
) -> Lineage:
    """The lineage of a run, from its record and the commit files of its stages; their files are not read."""
    keys = {str(stage): str(key) for stage, key in dict(record.get("stages") or {}).items()}
    order = [*(name for name in stage_names() if name in keys), *sorted(set(keys) - set(stage_names()))]
    found = (look_up_in(storage, name, keys[name]) for name in order)
    manifests = [manifest for manifest in found if manifest is not None and manifest.key == keys[manifest.stage]]
    lineage = describe_lineage(
        str(record.get("name")),
        manifests,
        run=folder.url.rstrip("/").rpartition("/")[2],
        mlflow=(record.get("tracked_run"), record.get("mlflow_run_id")),
        files=files,
    )
    known = {link.stage: link for link in lineage.stages}
    # A stage whose commit file is gone or damaged is a link all the same.
    stages = tuple(known.get(name, StageLink(stage=name, key=keys[name])) for name in order)
    return Lineage(**{**vars(lineage), "stages": stages})
