"""A small GPT that learns to write Python from the running interpreter's own standard library.

The corpus is real text that every machine has. Modules are held out as a whole, by their top-level name. The model is
measured in bits per byte of the held-out modules, next to what bz2 and xz need for the same bytes.

These files are left out: test suites (many distributions strip them, and they repeat themselves), tables of numbers
written as Python (encodings, html.entities), documentation generated into modules (pydoc_data), build output
(_sysconfigdata*, config-*), and packages that pip installed.
"""

from __future__ import annotations

import bz2
import hashlib
import io
import lzma
import math
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_lib import EvalPrediction
from trainer_lib.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from trainer_lib.recipes import DataInfo, PrepareOutput

Row = dict[str, Any]

END, END_ID = "<|end|>", 0  # stands between files; predicting it costs bits, although it covers no bytes
NO_TARGET = -100
NOT_OURS = {"site-packages", "dist-packages", "lib-dynload", "__pycache__"}
LEFT_OUT = NOT_OURS | {"test", "tests", "idle_test", "encodings", "pydoc_data"}
HELD_OUT = {"test": (0, 7), "validation": (7, 12)}  # of 100 buckets, [first, end)


# ---------------------------------------------------------------------------------------------------------- data
def prepare(options: Mapping[str, Any], out: PrepareOutput) -> Mapping[str, Iterator[Row]]:
    """Read the library, hold modules out, learn a byte-pair vocabulary from the rest, and cut all of it into blocks.

    Args:
        options: `vocab_size`, `block_tokens` (targets per row) and `seed` (which modules are held out).
        out: receives `tokenizer.json`, `token_bytes.bin` (uint16 `[vocab_size]`: the bytes that each token stands for)
            and a table of sizes.

    Returns:
        For every split its rows, as `_blocks` makes them.
    """
    texts = {name: list(_texts(files)) for name, files in _splits(options["seed"]).items()}
    tokenizer = _learn_tokenizer(texts["train"], options["vocab_size"])
    out.write_file("tokenizer.json", tokenizer.to_str().encode())
    out.write_file("token_bytes.bin", _token_bytes(tokenizer).tobytes())
    out.info["vocab_size"] = tokenizer.get_vocab_size()
    out.info["block_tokens"] = options["block_tokens"]
    out.info["corpus"] = {name: {"files": len(files), "bytes": sum(map(len, files))} for name, files in texts.items()}
    out.info["compressors"] = {name: _compressors(b"".join(texts[name])) for name in HELD_OUT}
    return {name: _blocks(tokenizer, files, options["block_tokens"]) for name, files in texts.items()}


def _splits(seed: int) -> dict[str, list[Path]]:
    """The library's files by split, in the order of their names; the hash of a module's name picks its split."""
    root = Path(sysconfig.get_path("stdlib"))
    splits: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if (
            LEFT_OUT & set(parts)
            or parts[0].startswith(("_sysconfigdata", "config-"))
            or parts == ("html", "entities.py")
        ):
            continue
        splits[_split_of(parts[0].removesuffix(".py"), seed)].append(path)
    for name, files in splits.items():
        if not files:
            raise DataError(
                f"No module of {root} falls into the split '{name}'.", remedy="Choose another prepare.options.seed."
            )
    return splits


def _split_of(module: str, seed: int) -> str:
    bucket = int(hashlib.sha256(f"{seed}/{module}".encode()).hexdigest()[:8], 16) % 100
    return next((name for name, (first, end) in HELD_OUT.items() if first <= bucket < end), "train")


def _texts(files: Sequence[Path]) -> Iterator[bytes]:
    """The files' bytes; files that are not UTF-8 are left out (CPython's own library has none)."""
    for path in files:
        text = path.read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        yield text


def _compressors(text: bytes) -> dict[str, float]:
    """Bits per byte of common compressors at their highest level, on one stream of all files of a split."""
    sizes = {"bz2": len(bz2.compress(text, 9)), "xz": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))}
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def _learn_tokenizer(texts: Sequence[bytes], vocab_size: int) -> Tokenizer:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingExtraError("This example needs the package tokenizers.", extra="transformers") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    return tokenizer


def _token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """The bytes that each token stands for, `[vocab_size]`: byte-level BPE writes a byte as one printable character."""
    lengths = {index: 0 if token == END else len(token) for token, index in tokenizer.get_vocab().items()}
    return np.array([lengths[index] for index in range(len(lengths))], dtype=np.uint16)


def _blocks(tokenizer: Tokenizer, texts: Sequence[bytes], block_tokens: int) -> Iterator[Row]:
    """Rows of `block_tokens + 1` tokens. Neighbours share one token, so every token but the first is a target once."""
    tokens = [token for text in texts for token in (END_ID, *tokenizer.encode(text.decode()).ids)]
    stream = np.array([*tokens, END_ID], dtype=np.uint16)
    for start in range(0, len(stream) - 1, block_tokens):
        block = stream[start : start + block_tokens + 1]
        padded = np.full(block_tokens + 1, END_ID, dtype=np.uint16)
        padded[: len(block)] = block
        yield {"tokens": padded, "num_targets": len(block) - 1}


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """Make a batch of rows: input_ids and labels, both `[batch, block_tokens]`; padding is not a target."""
    tokens = torch.from_numpy(np.stack([row["tokens"] for row in rows]).astype(np.int64))
    num_targets = torch.tensor([row["num_targets"] for row in rows])
    labels = tokens[:, 1:].clone()
    labels[torch.arange(labels.shape[1]) >= num_targets[:, None]] = NO_TARGET
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


# --------------------------------------------------------------------------------------------------------- model
class GPT(nn.Module):
    """A decoder-only transformer whose output layer is its embedding (tied weights).

    Args:
        token_bytes: the bytes that each token stands for, `[vocabulary]`; saved with the weights, because measuring the
            model needs them.
        width: width of the residual stream `[batch, tokens, width]`.
        layers: number of blocks.
        heads: attention heads per block.
        block_tokens: the longest input.
    """

    def __init__(self, token_bytes: Tensor, width: int, layers: int, heads: int, block_tokens: int) -> None:
        super().__init__()
        self.block_tokens = block_tokens
        self.tokens = nn.Embedding(len(token_bytes), width)
        self.positions = nn.Embedding(block_tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.register_buffer("token_bytes", token_bytes)
        self.token_bytes: Tensor
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # as GPT-2: layers that write to the residual stream start smaller
                residual = name.endswith(("project.weight", "shrink.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits `[batch, tokens, vocabulary]` for `input_ids` `[batch, tokens]`; with `labels` also the loss.

        `labels` `[batch, tokens]` are the next tokens, -100 where there is no target. With them, `target_bytes`
        `[batch]` counts the bytes that each row's targets stand for.
        """
        hidden = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = functional.linear(self.norm(hidden), self.tokens.weight)
        if labels is None:
            return {"logits": logits}
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_TARGET)
        target_bytes = (self.token_bytes[labels.clamp(min=0)] * (labels != NO_TARGET)).sum(dim=1)
        return {"loss": loss, "logits": logits, "target_bytes": target_bytes}


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm and added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.RMSNorm(width)
        self.grow = nn.Linear(width, 4 * width, bias=False)
        self.shrink = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map the residual stream `[batch, tokens, width]` to one of equal shape."""
        batch, tokens, width = hidden.shape
        mixed = self.mix(self.attention_norm(hidden)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(seen.transpose(1, 2).reshape(batch, tokens, width))
        grown: Tensor = self.shrink(functional.gelu(self.grow(self.feed_norm(hidden)), approximate="tanh"))
        return hidden + grown


def build_model(options: Mapping[str, Any], data: DataInfo) -> nn.Module:
    """Build the untrained network; `options` are the spec's `train.model`: width, layers, heads."""
    token_bytes = np.frombuffer(data.read_file("token_bytes.bin"), dtype=np.uint16).astype(np.int64)
    return GPT(torch.from_numpy(token_bytes), block_tokens=data.info["block_tokens"], **options)


# --------------------------------------------------------------------------------------------------- measurement
def preprocess_logits_for_metrics(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Reduce `[batch, tokens, vocabulary]` to `[batch, 2]`: each row's negative log-likelihood (nats) and its bytes."""
    logits, target_bytes = outputs
    nats = functional.cross_entropy(logits.transpose(1, 2).float(), labels, ignore_index=NO_TARGET, reduction="none")
    return torch.stack((nats.sum(dim=1), target_bytes.to(nats.dtype)), dim=1)


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Bits per byte, which an arithmetic coder driven by the model would need; predictions are `[rows, 2]`."""
    nats, num_bytes = np.asarray(evaluation.predictions, dtype=np.float64).sum(axis=0)
    return {"bits_per_byte": float(nats / math.log(2) / num_bytes), "bytes": float(num_bytes)}


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> Mapping[str, Sequence[Any]]:
    """Turn `[rows, 2]` into the columns of the prediction files: the bytes of each block, and its bits per byte."""
    nats, num_bytes = predictions.astype(np.float64).T
    return {"bytes": num_bytes.astype(np.int64), "bits_per_byte": nats / math.log(2) / np.maximum(num_bytes, 1)}


def after_evaluate(model: nn.Module, data: DataInfo, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write samples and the learning curve; report the compressors' bits per byte next to the model's."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(data.read_file("tokenizer.json").decode())
    ask = partial(_sample, model, tokenizer, data.info["block_tokens"], options["sample_tokens"])
    samples = [ask(prompt) for prompt in options["prompts"]]
    metrics = {
        f"{name}_bits_per_byte_{split}": bits
        for split, compressors in data.info["compressors"].items()
        for name, bits in compressors.items()
    }
    rule = "\n" + "-" * 80 + "\n"
    files = {"samples.txt": rule.join(samples).encode(), "curve.svg": _curve(data)}
    return {"metrics": metrics, "files": files}


@torch.no_grad()
def _sample(model: nn.Module, tokenizer: Tokenizer, block_tokens: int, num_tokens: int, prompt: str) -> str:
    """Continue `prompt` by `num_tokens` tokens drawn at temperature 0.8, with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    ids = [END_ID, *tokenizer.encode(prompt).ids]
    for _ in range(num_tokens):
        window = torch.tensor([ids[-block_tokens:]], device=device)
        logits = model(window)["logits"][0, -1].float().cpu()
        logits[END_ID] = -math.inf
        ids.append(int(torch.multinomial(torch.softmax(logits / 0.8, dim=0), 1, generator=generator)))
    return str(tokenizer.decode(ids[1:]))


def _curve(data: DataInfo) -> bytes:
    """Plot validation bits per byte over optimizer steps, with those of bz2 and xz on the same bytes; an SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    points = [(entry["step"], entry["eval_bits_per_byte"]) for entry in data.history if "eval_bits_per_byte" in entry]
    with rc_context({"svg.hashsalt": "stdlib_lm"}):  # the same curve gives the same file
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="optimizer step", ylabel="bits per byte, validation modules")
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=f"GPT: {points[-1][1]:.3f}")
        for style, (name, bits) in zip(("--", ":"), data.info["compressors"]["validation"].items(), strict=True):
            axes.axhline(bits, color="0.4", linestyle=style, label=f"{name}: {bits:.3f}")
        axes.legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
