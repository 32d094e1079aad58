"""Tokenizers of transformers: given by name or folder, or learned from the training texts; kept beside the data."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

_UNKNOWN = "[UNK]"
_SPECIAL = ["[PAD]", _UNKNOWN, "[CLS]", "[SEP]"]


def load_tokenizer(place: str, *, pad_token: str | None, field: str) -> Any:
    """The tokenizer of a model on the Hub or in a folder.

    Args:
        place: the model's name, or its folder.
        pad_token: the token that fills up short texts, for a tokenizer that has none.
        field: the option that names the model, for errors.

    Raises:
        ConfigError: there is no such model here, or its tokenizer has no token to pad with. MissingExtraError:
            transformers is not installed.
    """
    from_pretrained = import_transformers().AutoTokenizer.from_pretrained
    try:
        tokenizer = from_pretrained(place)
    except (OSError, ValueError) as error:
        raise no_model(place, error, field=field) from error
    if tokenizer.pad_token is not None:
        return tokenizer
    if pad_token is None or pad_token not in tokenizer.get_vocab():
        end = tokenizer.eos_token
        what = "no token to pad with" if pad_token is None else f"no token '{pad_token}'"
        raise ConfigError(
            f"The tokenizer has {what}, and texts of a batch must be of one length.",
            field="prepare.options.pad_token",
            value=pad_token,
            remedy=f"Set prepare.options.pad_token={end or 'TOKEN'}, a token that it has.",
        )
    tokenizer.pad_token = pad_token
    return tokenizer


def learn_tokenizer(texts: Sequence[str], *, vocabulary: int, max_length: int) -> Any:
    """A WordPiece tokenizer with at most `vocabulary` tokens, learned from the texts; equal texts give an equal one."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    learner = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, learner)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": _UNKNOWN, "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = import_transformers().PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, model_max_length=max_length, **names)


def keep_tokenizer(tokenizer: Any, out: PrepareOutput) -> list[str]:
    """Write the tokenizer's files beside the prepared data; return their names."""
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        names = [f"tokenizer/{path.relative_to(folder).as_posix()}" for path in files]
        for name, path in zip(names, files, strict=True):
            out.write_file(name, path.read_bytes())
    return names


def kept_tokenizer(data: DataInfo) -> Any:
    """The tokenizer that `keep_tokenizer` has written; read once in a process."""
    return data.once("tokenizer", lambda: _read_tokenizer(data))


def _read_tokenizer(data: DataInfo) -> Any:
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        for name in data.info["tokenizer"]:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.read_file(name))
        return import_transformers().AutoTokenizer.from_pretrained(Path(folder, "tokenizer"))


def no_model(place: str, error: Exception, *, field: str) -> ConfigError:
    """The error for a model that transformers cannot load."""
    return ConfigError(
        f"transformers cannot load this model: {str(error).splitlines()[0]}",
        field=field,
        value=place,
        remedy="Check the name; without a network, give the folder of a model (folder: PATH), or none, for a new one.",
    )


def import_transformers() -> Any:
    """The package transformers. Raises MissingExtraError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("This recipe needs transformers.", extra="transformers") from error
    return transformers
