"""Which functions of a recipe each stage calls, and so which code its key covers."""

from __future__ import annotations

import ast
import hashlib
import sys
from typing import TYPE_CHECKING

from trainflow.tasks.code.definitions import Piece
from trainflow.tasks.code.known_calls import QUIET_PACKAGES
from trainflow.tasks.code.reach import Code, Reach

if TYPE_CHECKING:
    from trainflow.tasks.configs import StageSettings
    from trainflow.tasks.stage.context import StageContext

PREPARE = ("prepare", "list_sources", "prepare_shard")
MODEL = ("build_model", "collate", "compute_loss_func", "callbacks", "Trainer")
METRICS = ("compute_metrics", "metric_sums", "metrics_from_sums", "preprocess_logits_for_metrics")
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
_WITHOUT_CALLBACKS = {"builtins", "numpy", "torch", "trainer_lib", "transformers", *sys.stdlib_module_names} | (
    QUIET_PACKAGES - {"keras", "lightning"}
)
# What draws random numbers, or sets up the process, changes the training that goes on after an evaluation.
_RANDOM = ("rand", "seed", "shuffle", "permut", "bootstrap", "bernoulli", "multinomial")
_DRAWS = {"choice", "choices", "normal", "normal_", "sample", "uniform", "uniform_"}
_SETS_UP = ("set_", "use_deterministic", "environ", "putenv", "chdir", "setattr", "inject", "patch")
_MUTATES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "fill", "fill_", "insert", "pop", "popitem", "popleft",
    "put", "remove", "resize", "reverse", "rotate", "send", "setdefault", "sort", "subtract", "update", "next",
}  # fmt: skip
_UNCHANGING = (int, float, complex, str, bytes, bool, type(None))


def code_of(config: StageSettings, context: StageContext) -> Code:
    """The code of a stage's recipe: its own file, and behind it the pipeline's."""
    fallback = context.recipe if config.recipe else None
    return context.resolver.code(config.recipe or context.recipe, fallback, context.root)


def reach_of_train(code: Code, *, evaluations_choose: bool) -> Reach:
    """What train's functions reach; with those that measure only where they can change the weights.

    Args:
        evaluations_choose: a metric decides which weights come out, when training ends, or the learning rate.
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
    """What predict's functions reach; a Trainer of the recipe may call `compute_metrics` as well."""
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
    words = {word for piece in reached.pieces for word in piece.references.words}
    # An import may rename it.
    words |= {piece.target.name for piece in reached.pieces if piece.target is not None and piece.target.name}
    if reached.everything is not None or words & _SEES_METRICS:
        return True
    if any(name.partition(".")[0] not in _WITHOUT_CALLBACKS for name in reached.outside):
        return True
    # A callback from a package, such as one that stops early.
    own = {name for piece in reached.pieces if piece.target is None for name in piece.names}
    return any(word.endswith("Callback") for word in words - own - _QUIET_CALLBACKS)


def _disturbs_training(metrics: Reach, training: Reach) -> bool:
    """Whether measuring may change the training that goes on after it, through what both hold in one process."""
    if metrics.everything is not None:
        return True
    both = set(training.pieces)
    mutates = any(_MUTATES & piece.references.words for piece in metrics.pieces)
    for piece in metrics.pieces:
        # A call at import has run before; it keeps nothing under a name.
        if piece.target is None and not isinstance(piece.node, ast.Expr):
            if piece in both and not _cannot_change(piece, mutates=mutates):
                return True
            if piece.references.changes or "global" in piece.references.words:
                return True
        if not isinstance(piece.node, ast.Expr) and _acts(piece):
            return True
    return False


def _acts(piece: Piece) -> bool:
    names = piece.references.words | {piece.target.name or "" if piece.target else ""}
    draws = bool(names & _DRAWS) or any(part in name.lower() for name in names for part in _RANDOM)
    return draws or any(name.startswith(_SETS_UP) for name in names)


def _cannot_change(piece: Piece, *, mutates: bool) -> bool:
    """Whether a statement that both use holds nothing that measuring could change.

    Args:
        mutates: the code that measures changes containers, perhaps only its own.
    """
    node = piece.node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        # A cache, and a default that is changed in place, live as long as the process.
        defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
        plain = all(_is_unchanging(each, containers=False) for each in defaults)
        return plain and not node.decorator_list
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        return _is_unchanging(node.value, containers=not mutates)
    # The attributes of a class can be changed.
    return False


def _is_unchanging(node: ast.expr, *, containers: bool) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, _UNCHANGING)
    kinds: tuple[type[ast.expr], ...] = (ast.Tuple, ast.UnaryOp, ast.BinOp, ast.Compare, ast.BoolOp)
    if isinstance(node, (*kinds, ast.List, ast.Dict, ast.Set) if containers else kinds):
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        return all(_is_unchanging(part, containers=containers) for part in parts)
    return False
