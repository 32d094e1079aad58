"""Import a checkpoint of the transformers Trainer: read its folder, and convert the parts to our format.

::

    model.safetensors (or shards and their index)        weights
    optimizer.pt scheduler.pt scaler.pt rng_state*.pth   read without running what is in them
    trainer_state.json                                   step, epoch, log, best metric
    config.json, the tokenizer's files                   copied
    training_args.bin, pytorch_model.bin                 pickles: left out, never opened

A file that `torch.save` wrote is a ZIP archive of ``data.pkl``, a pickle, and the bytes of each tensor's storage. A
pickle is a program that may import and call anything; torch's `weights_only` interpreter carries out a closed list of
its instructions and imports (tensors, numbers, texts, lists, dictionaries; here NumPy's arrays of numbers as well) and
refuses any other by its name. Archives that unpack to more bytes than they have, tensors larger than their bytes,
values without end and formats from before torch 1.6 are refused as well.

The model of the checkpoint, for names, shapes and their order, is what a function of the user returns. No code in the
folder or on the Hub runs, and nothing is downloaded.

Only `trainflow checkpoints import` reads such folders, in a worker process: checkpoints of trainflow hold no such file.
"""

from __future__ import annotations

import errno
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from trainer_lib.base.json_text import parse_json
from trainer_lib.checkpoint.catalogue import matches_any, refuse_source, require_importable
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.checkpoint.values import encode_state, to_json
from trainer_lib.errors import ConfigError, DamagedError, StorageError
from trainer_lib.state import TrainerState
from trainer_lib.storage import Store

_JSON_LIMIT = 512 * 2**20
_FILE_LIMIT = 256 * 2**20  # the largest JSON file and the largest copied file that are read, in bytes
_SHARD = re.compile(r"[\w.-]{1,200}\.safetensors")
_RNG = re.compile(r"rng_state(?:_(\d{1,6}))?\.pth")
_COPIED = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "vocab.*"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "merges.txt", "*.model", "chat_template.*"),
)
_RUNNABLE = ("*.py", "*.so", "*.sh", "*.pkl", "*.bin", "*.pt", "*.pth")
_INDEX = "model.safetensors.index.json"
_READ = {"trainer_state.json", "optimizer.pt", "scheduler.pt", "scaler.pt", _INDEX}
_PROGRAM_LIMIT = 128 * 2**20  # bytes of data.pkl
_RECORDS = 2_000_000  # files in the archive
_SMALLEST = 22  # bytes of the record that ends an archive
_VALUES = 2_000_000  # values in the result
_DEPTH = 64  # levels of nesting in the result
# In torch's message: the import that it refuses, or what else is wrong. Its rest advises to load the file all the same.
_IMPORT = re.compile(r"GLOBAL (\S+)")
_REASON = re.compile(r"WeightsUnpickler error:\s*(.+)")


def _numpy_names() -> list[Any]:
    """The constructors of NumPy's arrays and numbers in a random state, under NumPy's old and new names."""
    core = np._core.multiarray  # type: ignore[attr-defined]  # NumPy's stubs leave it out
    names: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(code)) for code in "?bhilqBHILQefd")]
    for function in (core._reconstruct, core.scalar):
        names += [(function, f"numpy.{module}.multiarray.{function.__name__}") for module in ("core", "_core")]
    return names


def read_torch_file(store: Store, rel: str) -> Any:
    """Read a file's value: dicts with text or number keys, lists, tuples, numbers, texts, and tensors on the CPU.

    NumPy arrays become tensors. Raises StorageError, and DamagedError for what is not understood.
    """
    where = f"{store.url}/{rel}"
    size = store.size(rel)
    with store.open_read(rel) as stream:
        try:
            _check_archive(stream, size, where)
            with torch.serialization.safe_globals(_numpy_names()):
                value = torch.load(stream, map_location="cpu", weights_only=True)
            return _Plain(where).copy_value(value, 0)
        except StorageError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EINVAL:
                raise
            raise refuse_file(where, "its records lie outside of it") from error  # a seek before the file's first byte
        except MemoryError:
            raise refuse_file(where, "it asks for more memory than there is") from None
        except Exception as error:  # the many ways in which an archive or a program can be wrong
            raise refuse_file(where, _describe_refusal(error)) from error


def refuse_file(where: str, reason: str) -> DamagedError:
    """The error for a file at a URL that cannot be imported; `reason` is a clause ("it is compressed")."""
    remedy = "Nothing was imported. If you trust the file, load it with the program that wrote it and save it again."
    return DamagedError(f"The file is refused: {reason}.", field=where, remedy=remedy)


def _describe_refusal(error: Exception) -> str:
    text = str(error)
    if (refused := _IMPORT.search(text)) is not None:
        return f"loading it would import {refused[1][:80]!r}, which can run code"
    reason = _REASON.search(text)
    text = text if reason is None else reason[1]
    return f"it cannot be read ({(text.splitlines() or [type(error).__name__])[0][:160]})"


def _check_archive(stream: BinaryIO, size: int, where: str) -> None:
    """Check that the stream is an archive as torch writes it; leaves the stream at its start."""
    if size < _SMALLEST or not zipfile.is_zipfile(stream):
        raise refuse_file(where, "it is not a ZIP archive, which torch writes since version 1.6")
    stream.seek(0)
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
    programs = [record for record in records if record.filename.rpartition("/")[2] == "data.pkl"]
    if len(records) > _RECORDS or len({record.filename for record in records}) != len(records) or len(programs) != 1:
        raise refuse_file(where, "its records are not those of torch.save")
    # Bit 1 marks an encrypted record.
    if any(record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 for record in records):
        raise refuse_file(where, "it is compressed, which torch never does")
    if sum(record.file_size for record in records) > size or programs[0].file_size > _PROGRAM_LIMIT:
        raise refuse_file(where, "it would unpack to more bytes than it has")
    stream.seek(0)


class _Plain:
    """Copies the result into plain containers, within bounds.

    A program may put one object into many places, so that a small file grows without end when it is copied.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._left = _VALUES

    def copy_value(self, value: Any, depth: int) -> Any:
        """Copy a value. Raises DamagedError unless it is a plain one, and neither too large nor nested too deeply."""
        self._left -= 1
        if self._left < 0 or depth > _DEPTH:
            raise refuse_file(self._where, f"it holds more than {_VALUES:,} values, or nests them deeper than {_DEPTH}")
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
            return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.item()
        if isinstance(value, Tensor):
            return self._check_tensor(value.detach())
        if isinstance(value, list | tuple):
            items = [self.copy_value(item, depth + 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
            return {key: self.copy_value(item, depth + 1) for key, item in value.items()}
        raise refuse_file(self._where, f"it holds a {type(value).__name__.strip('_')}")

    def _check_tensor(self, tensor: Tensor) -> Tensor:
        """Return a dense tensor `[...]` on the CPU whose values are all in the file."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise refuse_file(self._where, "it holds a tensor that is sparse, quantized or without values")
        # An expanded tensor of a few bytes would fill the memory when it is copied.
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise refuse_file(self._where, "a tensor is larger than its bytes")
        return tensor


@dataclass
class Source:
    """The content of a transformers Trainer's checkpoint."""

    url: str
    tensors: dict[str, Tensor]  # the weights: name → tensor on the CPU, in its saved shape and dtype
    adapter: bool  # whether the weights are those of a peft adapter
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    scaler: dict[str, Any] | None
    rngs: list[dict[str, Any]]  # random states by rank, as `capture_rng` returns them; empty when a rank's are missing
    state: TrainerState
    files: dict[str, bytes] = field(default_factory=dict)  # the files to copy, name → bytes
    left_out: list[str] = field(default_factory=list)  # names of the files that were not opened


def read_source(store: Store) -> Source:
    """Read a ``checkpoint-N/`` of the transformers Trainer whole. Raises ConfigError, DamagedError and StorageError."""
    names = _check_kind(store)
    state = TrainerState.from_dict(_read_json(store, "trainer_state.json"))
    optimizer, scheduler = _read_dictionary(store, "optimizer.pt"), _read_dictionary(store, "scheduler.pt")
    scaler = _read_dictionary(store, "scaler.pt") if "scaler.pt" in names else None
    rngs, rng_files = _read_rngs(store, names)
    tensors, weight_files = _read_weights(store, names)
    copied = {name for name in names if matches_any([name], _COPIED) and not matches_any([name], _RUNNABLE)}
    used = {*_READ, *rng_files, *weight_files, *copied}
    return Source(
        url=store.url,
        tensors=tensors,
        adapter="adapter_model.safetensors" in weight_files,
        optimizer=_check_optimizer(optimizer, f"{store.url}/optimizer.pt"),
        scheduler=scheduler,
        scaler=scaler,
        rngs=rngs,
        state=state,
        files={name: store.read_bytes(name, limit=_FILE_LIMIT) for name in sorted(copied)},
        left_out=sorted(names - used),
    )


def derive_position(state: TrainerState) -> dict[str, Any]:
    """Derive the position in the data: whole epochs, and optimizer steps of the epoch after them. Raises DamagedError.

    The file states the global step s and the epoch E, a fraction that counts micro-batches, but not the steps per epoch
    U. With M micro-batches per epoch and A per step, U = ceil(M / A). After k steps of epoch e, s = e * U + k and
    E = e + k * A / M, which lies in [e + k / U, e + k / (U - 1)). Hence U - 1 < s / E <= U.
    """
    step, epoch = int(state.global_step), float(state.epoch)
    # The epoch is a float that the reference computed by division: 1.9999999998 is epoch 2.
    whole = math.floor(epoch + 1e-9)
    if whole == 0:
        return {"epoch": 0, "step_in_epoch": step, "samples_seen": 0}
    per_epoch = math.ceil(step / epoch - 1e-6)
    done = step - whole * per_epoch
    if not 0 <= done < max(per_epoch, 1):
        remedy = "Use another checkpoint."
        raise DamagedError(f"Step {step} cannot be at epoch {epoch:g}.", field="trainer_state.json", remedy=remedy)
    return {"epoch": whole, "step_in_epoch": done, "samples_seen": 0}


def convert_optimizer(optimizer: Mapping[str, Any], names: Sequence[Sequence[str]]) -> OptimizerSnapshot:
    """Convert an optimizer's ``state_dict()`` to a snapshot by parameter name; groups without parameters are left out.

    `names` of the groups' parameters are in order. Raises ConfigError for a value that is neither a tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {}

    def keep(key: str, tensor: Tensor) -> dict[str, Any]:
        tensors[key] = tensor
        return {"__tensor__": key, "device": "any"}  # the file does not state where the tensor was

    groups, state = [], {}
    for place, (group, called) in enumerate(zip(optimizer["param_groups"], names, strict=True)):
        for number, name in zip(group["params"], called, strict=True):
            if (values := optimizer["state"].get(number)) is not None:
                state[name] = {str(key): to_json(value, f"{name}/{key}", keep) for key, value in values.items()}
        if called:
            settings = {key: value for key, value in group.items() if key != "params"}
            encoded = {str(key): to_json(value, f"group.{place}/{key}", keep) for key, value in settings.items()}
            groups.append({**encoded, "params": list(called)})
    return OptimizerSnapshot(tensors, groups, {"state": state})


def convert_scheduler(scheduler: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Convert a schedule's ``state_dict()`` to the groups that have parameters; its functions are not restored."""
    kept = [place for place, called in enumerate(names) if called]
    state = {}
    for key, value in scheduler.items():
        # A list as long as the groups has one value per group (base_lrs, lr_lambdas, ...).
        per_group = isinstance(value, list) and len(value) == len(names)
        state[key] = [value[place] for place in kept] if per_group else value
    if "lr_lambdas" in state:
        # torch writes None for a function; only a callable object has state here.
        state["lr_lambdas"] = [None] * len(kept)
    return state


# -- the folder --------------------------------------------------------------------------------------------------------


def _check_kind(store: Store) -> set[str]:
    """Check that the folder can be imported; returns the names of its files."""
    require_importable(store)
    names = {info.path for info in store.list()}
    # `list` leaves out pipes and empty folders: names that `children` has, without children of their own.
    folders = {name.partition("/")[0] for name in names}
    links = store.links() + [name for name in store.children() if name not in folders and not store.children(name)]
    if links:
        what = "A link or a pipe is in the place of a file; it may lead anywhere."
        remedy = "Copy the folder with the files in their places (cp -rL) if you trust it."
        raise DamagedError(what, field=f"{store.url}/{links[0]}", remedy=remedy)
    if "trainer_state.json" not in names:
        what = "The folder has no trainer_state.json, so its step is unknown."
        raise refuse_source(store, what, "Name a complete checkpoint.")
    for name in ("optimizer.pt", "scheduler.pt"):
        if name not in names:
            what = f"The folder has no {name}: it holds the model only, or shards of FSDP or DeepSpeed."
            raise refuse_source(store, what, "Load its weights (from_pretrained) and start a new training.")
    return names


def _read_json(store: Store, name: str) -> dict[str, Any]:
    where, data = f"{store.url}/{name}", store.read_bytes(name, limit=_JSON_LIMIT)
    try:
        record = parse_json(data)
    except ValueError as error:
        raise refuse_file(where, f"it is not JSON ({str(error)[:80]})") from error
    return _require_mapping(record, where)


def _read_dictionary(store: Store, name: str) -> dict[str, Any]:
    return _require_mapping(read_torch_file(store, name), f"{store.url}/{name}")


def _require_mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise refuse_file(where, "it does not hold a dictionary")
    return value


# -- the weights -------------------------------------------------------------------------------------------------------


def _read_weights(store: Store, names: set[str]) -> tuple[dict[str, Tensor], set[str]]:
    """Read the weights: name → tensor, and the names of the files that hold them."""
    for whole in ("model.safetensors", "adapter_model.safetensors"):
        if whole in names:
            return read_safetensors(store, whole), {whole}
    if _INDEX in names:
        return _read_shards(store, names)
    remedy = "Load pytorch_model.bin with from_pretrained, and write model.safetensors here with save_pretrained."
    raise refuse_source(store, "The folder has no weights in safetensors.", remedy)


def _read_shards(store: Store, names: set[str]) -> tuple[dict[str, Tensor], set[str]]:
    where = f"{store.url}/{_INDEX}"
    weight_map = _require_mapping(_read_json(store, _INDEX).get("weight_map"), where)
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard) or shard not in names:
            raise refuse_file(where, f"it names a file that is not in the folder: {str(shard)[:80]!r}")
    shards = list(dict.fromkeys(weight_map.values()))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        # A tensor in two files would be loaded in whichever order they are read.
        for name, tensor in read_safetensors(store, shard).items():
            if weight_map.get(name) != shard:
                raise refuse_file(f"{store.url}/{shard}", f"it holds {name[:80]!r}, which the index says is elsewhere")
            tensors[name] = tensor
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise refuse_file(where, f"no file holds {missing[0][:80]!r}, which it lists")
    return tensors, {_INDEX, *shards}


# -- what torch.save wrote ---------------------------------------------------------------------------------------------


def _check_optimizer(optimizer: dict[str, Any], where: str) -> dict[str, Any]:
    """Check that this is an optimizer's ``state_dict()``, its parameters numbered from 0 through its groups."""
    groups, state = optimizer.get("param_groups"), optimizer.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise refuse_file(where, "it does not hold an optimizer's state")
    numbers: list[Any] = []
    for group in groups:
        members = group.get("params") if isinstance(group, dict) else None
        if not isinstance(members, list):
            raise refuse_file(where, "a group in it lists no parameters")
        numbers += members
    # type(): True == 1, and would pass the first comparison.
    if numbers != list(range(len(numbers))) or any(type(number) is not int for number in numbers):
        raise refuse_file(where, "it does not number its parameters from 0 on")
    if not all(type(number) is int and isinstance(values, dict) for number, values in state.items()):
        raise refuse_file(where, "its state is not by parameter")
    return optimizer


def _read_rngs(store: Store, names: set[str]) -> tuple[list[dict[str, Any]], set[str]]:
    """Read the random states by rank, and the names of their files; none when a rank's are missing."""
    ranks = {int(match.group(1) or 0): name for name in names if (match := _RNG.fullmatch(name))}
    if sorted(ranks) != list(range(len(ranks))):  # better no random states than those of some ranks
        return [], set()
    return [
        _convert_rng(read_torch_file(store, ranks[rank]), rank, f"{store.url}/{ranks[rank]}") for rank in sorted(ranks)
    ], set(ranks.values())


def _convert_rng(saved: Any, rank: int, where: str) -> dict[str, Any]:
    try:
        version, words, gauss = saved["python"]
        kind, keys, place, has_gauss, cached = saved["numpy"]
        state: dict[str, Any] = {
            "python": [version, list(words), gauss],
            "numpy": [str(kind), keys.tolist(), int(place), int(has_gauss), float(cached)],
            "torch": encode_state(saved["cpu"]),
        }
        if "cuda" in saved:
            # A process that used several devices saved a list; each rank takes one of it.
            devices = saved["cuda"] if isinstance(saved["cuda"], list) else [saved["cuda"]]
            state["cuda"] = encode_state(devices[rank % len(devices)])
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise refuse_file(where, f"it does not hold random states ({type(error).__name__}: {error})") from error
    return state


# -- the model ---------------------------------------------------------------------------------------------------------


def converted(model: nn.Module, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """Weights, name → tensor `[...]`, under the names that a model of transformers has in memory; or None.

    Its files may use other names: those of experts that are joined when they are loaded. Raises ConfigError.
    """
    try:
        import transformers
    except ImportError:
        return None
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if not isinstance(model, transformers.PreTrainedModel) or len(dtypes) != 1:
        return None
    kind: Any = type(model)
    try:
        # Without a path nothing is read: what transformers does with names is all that is wanted.
        made, report = kind.from_pretrained(
            None, config=model.config, state_dict=dict(tensors), dtype=dtypes.pop(), output_loading_info=True
        )
    except Exception as error:
        what = f"transformers cannot give the weights to this model: {type(error).__name__}: {str(error)[:200]}"
        remedy = "Let the function of --model return the model as it was trained."
        raise ConfigError(what, field="model", value=kind.__name__, remedy=remedy) from error
    odd = any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state: Mapping[str, Tensor] = made.state_dict()
    return None if odd else state


def load_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put a peft adapter's weights, name → tensor `[...]`, into a model's. Raises ConfigError if it is another."""
    try:
        import peft
    except ImportError as error:
        raise _no_adapter(f"peft cannot be imported ({error})") from error
    if not isinstance(model, peft.PeftModel):
        raise _no_adapter(f"the model given is a {type(model).__name__}, not a PeftModel")
    expected = peft.get_peft_model_state_dict(model)
    # Names and shapes first, because peft ignores what does not fit.
    if expected.keys() != tensors.keys() or any(expected[name].shape != tensors[name].shape for name in tensors):
        raise _no_adapter(f"the model's adapter has other weights ({len(expected)}, the folder {len(tensors)})")
    peft.set_peft_model_state_dict(model, dict(tensors))


def _no_adapter(why: str) -> ConfigError:
    remedy = "Let the function return get_peft_model(base, config), as it was trained."
    return ConfigError(f"The folder holds a peft adapter, but {why}.", field="model", remedy=remedy)
