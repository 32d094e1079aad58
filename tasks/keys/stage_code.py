"""The functions of a recipe that each stage calls, and so the code that its key covers."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from typing import TYPE_CHECKING

from trainflow.tasks.code.program import Piece
from trainflow.tasks.code.reach import BASES, Code, Reach

if TYPE_CHECKING:
    from trainflow.tasks.configs import StageSettings
    from trainflow.tasks.stage.context import StageContext

PREPARE = ("prepare", "list_sources", "prepare_shard")
MODEL = ("build_model", "collate", "compute_loss_func", "callbacks", "Trainer")
METRICS = ("compute_metrics", "preprocess_logits_for_metrics")
EVALUATE = (*MODEL, *METRICS, "outcome_pairs", "after_evaluate")
PREDICT = (*MODEL, "preprocess_logits_for_metrics", "prediction_columns")

# By these a callback or a Trainer of the recipe sees metrics, or evaluates by itself.
_SEES_METRICS = {
    "GreedyLR", "ReduceLROnPlateau",
    "__dict__", "__getattr__", "__getattribute__", "asdict", "astuple", "attrgetter", "best_global_step", "best_metric",
    "best_model_checkpoint", "compute_metrics", "evaluate", "evaluation_loop", "getattr", "log", "log_history", "logs",
    "metrics", "on_evaluate", "on_log", "on_predict", "predict", "prediction_loop", "preprocess_logits_for_metrics",
    "save_to_json", "vars",
}  # fmt: skip
_QUIET_CALLBACKS = {"TrainerCallback", "ProgressCallback", "PrinterCallback", "StragglerCallback"}
# Callbacks of other packages may look at metrics under any name. These have none that do, but for those above.
_WITHOUT_CALLBACKS = (BASES - {"keras", "lightning"}) | {
    "PIL", "accelerate", "matplotlib", "pandas", "polars", "pyarrow", "safetensors", "scipy", "seaborn", "tqdm",
    *sys.stdlib_module_names,
}  # fmt: skip
# What draws random numbers, or sets up the process, changes the training that continues after an evaluation.
_ACTS = re.compile(
    r"(?i:.*(rand|seed|shuffle|permut|bootstrap|bernoulli|multinomial))|(choices?|normal_?|sample|uniform_?)$"
    r"|set_|use_deterministic|environ|putenv|chdir|setattr|inject|patch"
)
_MUTATES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "fill", "fill_", "insert", "pop", "popitem", "popleft",
    "put", "remove", "resize", "reverse", "rotate", "send", "setdefault", "sort", "subtract", "update", "next",
}  # fmt: skip


def code_of(config: StageSettings, context: StageContext) -> Code:
    """The code of a stage's recipe: its own file, and behind it the pipeline's."""
    fallback = context.recipe if config.recipe else None
    return context.resolver.code(config.recipe or context.recipe, fallback, context.root)


def reach_of_train(code: Code, *, evaluations_choose: bool) -> Reach:
    """Code that train's functions reach; those that measure count only where they can change the weights.

    That is where a metric decides which weights come out, when training ends, or the learning rate:
    `evaluations_choose`.
    """
    counts = evaluations_choose or evaluations_matter_to(code)
    return code.reach((*MODEL, *METRICS) if counts else MODEL)


def evaluations_matter_to(code: Code) -> bool:
    """Whether evaluations may change the training, through callbacks, a Trainer of the recipe, or what they share."""
    if _sees_metrics(code):
        return True
    measures = any(code.defines(name) for name in METRICS)
    return measures and _disturbs_training(code.reach(METRICS), code.reach(MODEL))


def reach_of_predict(code: Code) -> Reach:
    """Code that predict's functions reach; a Trainer of the recipe may call `compute_metrics` as well."""
    return code.reach((*PREDICT, *METRICS) if _sees_metrics(code) else PREDICT)


def metrics_digest(code: Code) -> str | None:
    """The version of the code that measures while training; None where the recipe measures nothing."""
    if not any(code.defines(name) for name in METRICS):
        return None
    found = code.reach(METRICS).digests
    return hashlib.sha256(
        "\n".join(f"{label} {digest}" for label, digest in sorted(found.items())).encode()
    ).hexdigest()


def _sees_metrics(code: Code) -> bool:
    """Whether callbacks or the Trainer of the recipe may look at what evaluations measure."""
    watchers = [name for name in ("callbacks", "Trainer") if code.defines(name)]
    if not watchers:
        return False
    reached = code.reach(watchers)
    words = {word for piece in reached.pieces for word in piece.words}
    if reached.everything is not None or words & _SEES_METRICS:
        return True
    if any(name.partition(".")[0] not in _WITHOUT_CALLBACKS for name in reached.outside):
        return True
    # A callback from a package, such as one that stops early.
    own = {name for piece in reached.pieces if piece.target is None for name in piece.names}
    return any(word.endswith("Callback") for word in words - own - _QUIET_CALLBACKS)


def _disturbs_training(metrics: Reach, training: Reach) -> bool:
    """Whether measuring may change the training that continues after it, through what both hold in one process."""
    if metrics.everything is not None or any(_ACTS.match(word) for piece in metrics.named for word in piece.words):
        return True
    pieces = [piece for piece in metrics.named if piece.target is None]
    mutates = any(_MUTATES & piece.words for piece in pieces)
    return any(
        _changes_others(piece) or (piece in training.named and not _cannot_change(piece, mutates=mutates))
        for piece in pieces
    )


def _changes_others(piece: Piece) -> bool:
    """Whether code sets a global, or an attribute or item of something that it does not hold itself."""
    seen = {chain[0] for chain in piece.chains}
    for node in ast.walk(piece.node):
        if isinstance(node, ast.Global):
            return True
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute | ast.Subscript):
                inner = inner.value
            if not isinstance(inner, ast.Name) or inner.id in seen:
                return True
    return False


def _cannot_change(piece: Piece, *, mutates: bool) -> bool:
    """Whether a statement that both use holds nothing that measuring, which `mutates` containers, could change."""
    node = piece.node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        # A cache, and a default that is changed in place, live as long as the process.
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        return all(_is_unchanging(value, containers=False) for value in defaults) and not node.decorator_list
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        return _is_unchanging(node.value, containers=not mutates)
    # The attributes of a class can be changed.
    return False


def _is_unchanging(node: ast.expr, *, containers: bool) -> bool:
    kinds: tuple[type[ast.expr], ...] = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.Compare, ast.BoolOp)
    kinds = (*kinds, ast.List, ast.Dict, ast.Set) if containers else kinds
    return isinstance(node, kinds) and all(
        _is_unchanging(part, containers=containers) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)
    )
