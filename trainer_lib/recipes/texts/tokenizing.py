"""Tokenizers of transformers: given by name or folder, or learned from the training texts; kept next to the data."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer_lib.errors import ConfigError
from trainer_lib.recipes.shared.model_places import from_place, import_transformers, one_of
from trainer_lib.recipes.texts.packing import Document

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput
    from trainer_lib.recipes.texts.documents import TextDocument

FIELD = "prepare.options"
_UNKNOWN = "[UNK]"
_SPECIAL = ["[PAD]", _UNKNOWN, "[CLS]", "[SEP]"]
_END = "<|endoftext|>"
_COUNTED = 1000  # texts whose tokens are counted at a time
_MUCH = 0.01  # of the texts: more that are cut are a warning
_TOGETHER = 64  # documents that the tokenizer is given at a time


def find_tokenizer(
    chosen: Mapping[str, Any], texts: Iterable[str], out: PrepareOutput, *, of_bytes: bool = False, **form: bool
) -> Any:
    """The tokenizer of the model that the options name, else one that is learned; kept next to the data and noted.

    It is learned from the texts, `of_bytes` where it has to write any text. `form` has `is_fast` or `of_words` of
    `load_tokenizer`, which says what is raised.
    """
    place, vocabulary = one_of(chosen, field=FIELD), chosen["vocabulary"]
    if place is not None:
        tokenizer = load_tokenizer(place, pad_token=chosen["pad_token"], **form)
    elif of_bytes:
        tokenizer = learn_byte_tokenizer(texts, vocabulary=vocabulary)
    else:
        tokenizer = learn_tokenizer(list(texts), vocabulary=vocabulary, max_length=chosen["max_length"])
    note_tokenizer(tokenizer, out)
    out.info["pad_token_id"] = tokenizer.pad_token_id
    return tokenizer


def note_tokenizer(tokenizer: Any, out: PrepareOutput) -> None:
    """Write a tokenizer's files next to the prepared data, and note their names and the number of its tokens."""
    names: list[str] = []
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            names.append(f"tokenizer/{path.relative_to(folder).as_posix()}")
            out.write_file(names[-1], path.read_bytes())
    out.info.update(vocabulary=len(tokenizer), tokenizer=names)


def load_tokenizer(place: str, *, pad_token: str | None, is_fast: bool = False, of_words: bool = False) -> Any:
    """The tokenizer of a model on the Hub or in a folder, which can fill up short texts.

    Args:
        pad_token: the token that fills up, for a tokenizer that has none.
        is_fast: it has to tell where its tokens are from.
        of_words: it gets texts that are split into words.

    Raises:
        ConfigError: there is no such model here, or its tokenizer has no token to pad with, or is not a fast one.
            MissingExtraError: transformers is not installed.
    """
    tokenizer = open_tokenizer(place)
    if of_words and getattr(tokenizer, "add_prefix_space", None) is False:  # it would take no words
        tokenizer = open_tokenizer(place, add_prefix_space=True)
    if tokenizer.pad_token is None and (pad_token is None or pad_token not in tokenizer.get_vocab()):
        end = tokenizer.eos_token
        what = "no token to pad with" if pad_token is None else f"no token '{pad_token}'"
        raise ConfigError(
            f"The tokenizer has {what}, and texts of a batch must be of one length.",
            field="prepare.options.pad_token",
            value=pad_token,
            remedy=f"Set prepare.options.pad_token={end or 'TOKEN'}, a token that it has.",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = pad_token
    if (is_fast or of_words) and not tokenizer.is_fast:
        what = "The model has a slow tokenizer, which does not tell where its tokens are from."
        remedy = "Name a model with a fast one (tokenizer.json)."
        raise ConfigError(what, field=FIELD, value=place, remedy=remedy)
    return tokenizer


def count_cut_texts(
    out: PrepareOutput, tokenizer: Any, *columns: Sequence[str], longest: int, kind: str = "texts", more: str = ""
) -> None:
    """Note as `cut_<kind>` how many texts have more than `longest` tokens, and warn where these are over 1 %.

    The kind is "texts", or "targets" with a separate length; `more` says in the warning what the texts are for. Of
    several columns those of a row are read together.
    """
    rows, cut = len(columns[0]), 0
    for start in range(0, rows, _COUNTED):
        together = [list(column[start : start + _COUNTED]) for column in columns]
        made = tokenizer(*together, return_attention_mask=False, verbose=False)["input_ids"]
        cut += sum(len(tokens) > longest for tokens in made)
    out.info[f"cut_{kind}"] = cut
    if cut > _MUCH * rows:
        option = "max_length is where, as far as the model reads" if kind == "texts" else "target_length is where"
        what = f"{cut:,} of {rows:,} texts{more} ({cut / rows:.0%}) have more than {longest} tokens, and are cut"
        out.warnings.append(f"{what}: prepare.options.{option}.")


def open_tokenizer(place: str, *, field: str = FIELD, **settings: Any) -> Any:
    """The tokenizer of a model on the Hub or in a folder, as it is. Raises ConfigError where there is none."""
    return from_place("AutoTokenizer", place, field=field, **settings)


def learn_tokenizer(texts: Sequence[str], *, vocabulary: int, max_length: int) -> Any:
    """A WordPiece tokenizer with at most `vocabulary` tokens, learned from the texts; equal texts give an equal one."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    normalizer, splitter = normalizers.NFKC(), pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))}
    # Numbered here, as the library numbers these in another order every time; ties between pairs go by number.
    inner = sorted({f"##{character}" for word in words for character in word[1:]})
    learned = Tokenizer(models.WordPiece(unk_token=_UNKNOWN))
    learned.normalizer, learned.pre_tokenizer = normalizer, splitter
    special = [*_SPECIAL, *inner]
    learner = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    learned.train_from_iterator(texts, learner)
    # Of these, only our own are special: the others stand in texts like any characters.
    tokenizer = Tokenizer(models.WordPiece(learned.get_vocab(), unk_token=_UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": _UNKNOWN, "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = import_transformers().PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, model_max_length=max_length, **names)


def learn_byte_tokenizer(texts: Iterable[str], *, vocabulary: int, special: Sequence[str] = ()) -> Any:
    """A byte-level BPE tokenizer with at most `vocabulary` tokens; equal texts give an equal one.

    It can write any text. <|endoftext|> ends a document, or the last one of the `special` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, learner)
    fast = import_transformers().PreTrainedTokenizerFast
    more = {"additional_special_tokens": list(special)} if special else {}
    ends = {"eos_token": [_END, *special][-1], "pad_token": _END}
    return fast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **ends, **more)


def tokenize_documents(documents: Iterable[TextDocument], tokenizer: Any) -> Iterator[Document]:
    """The tokens of documents: as the tokenizer makes them of a text, and at the end its token for the end."""
    end = tokenizer.eos_token_id
    waiting = iter(documents)
    while some := list(islice(waiting, _TOGETHER)):
        # Without the warning that a text is longer than the model's input: packing says what becomes of it.
        made: list[list[int]] = tokenizer(
            [document.text for document in some],
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        made.reverse()
        for document in some:
            tokens = made.pop()  # and free it with the array made: a tenth of the time is asking for new memory
            if end is not None and tokens[-1:] != [end]:
                tokens.append(end)
            yield Document(document.place, np.array(tokens, np.int32), source=document.source)


def decode_tokens(tokens: Any, data: DataInfo) -> list[str]:
    """The texts of generated tokens ``[rows, tokens]``; negative ones are left out."""
    plain = [row[row >= 0].tolist() for row in np.asarray(tokens)]
    texts: list[str] = kept_tokenizer(data).batch_decode(plain, skip_special_tokens=True)
    return texts


def batch_texts(data: DataInfo, *columns: Sequence[str]) -> dict[str, Any]:
    """Texts, cut at `max_length`, as tensors ``[rows, tokens]``; of several columns those of a row together."""
    settings = {"padding": True, "truncation": True, "max_length": data.info["max_length"], "return_tensors": "pt"}
    return dict(kept_tokenizer(data)(*map(list, columns), **settings))


def kept_tokenizer(data: DataInfo) -> Any:
    """The tokenizer that `note_tokenizer` has written; read once in a process."""

    def read() -> Any:
        with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
            for name in data.info["tokenizer"]:
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data.read_file(name))
            return import_transformers().AutoTokenizer.from_pretrained(Path(folder, "tokenizer"))

    return data.once("tokenizer", read)
