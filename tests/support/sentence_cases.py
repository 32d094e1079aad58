"""Trainers of sentence-transformers on tiny models: pairs, ranking, losses with weights, several data sets."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, Features, Value
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import BatchSamplers, DefaultBatchSampler, MultiDatasetBatchSamplers
from sentence_transformers.cross_encoder import losses as cross_losses
from sentence_transformers.cross_encoder.evaluation import (
    CrossEncoderCorrelationEvaluator,
    CrossEncoderRerankingEvaluator,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from tests.support.client_cases import Case
from tests.support.script_data import WORDS, save_models

TEXTS = [f"{WORDS[i % 15]} {WORDS[(3 * i + 1) % 15]} {WORDS[i // 15]} {WORDS[(7 * i + 2) % 15]}" for i in range(40)]
SCORES = [round((5 * i % 11) / 10, 1) for i in range(40)]
_COMMON: dict[str, Any] = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 2}
_COMMON |= {"learning_rate": 5e-3, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
_COMMON |= {"save_strategy": "steps", "save_steps": 2, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
_COMMON |= {"seed": 5}


class InOrder(DefaultBatchSampler):  # type: ignore[misc]
    def __init__(self, dataset: Any, **given: Any) -> None:
        super().__init__(torch.utils.data.SequentialSampler(dataset), **given)


def columns(count: int, *names: str, first: int = 0, **label: list[Any]) -> Dataset:
    texts = {name: [TEXTS[(first + i + 9 * place) % 40] for i in range(count)] for place, name in enumerate(names)}
    return Dataset.from_dict({**texts, **{name: values[:count] for name, values in label.items()}})


@functools.cache
def _bert() -> str:
    """The folder of a tiny BERT; written once, since only one of several processes would write it later."""
    folder = Path(tempfile.mkdtemp())
    save_models(folder, "bert")
    return str(folder / "bert")


def encoder() -> SentenceTransformer:
    folder = _bert()
    torch.manual_seed(0)  # the folder has no pooler: its weights are drawn when the model is loaded
    body = Transformer(folder, max_seq_length=16)
    return SentenceTransformer(modules=[body, Pooling(16)], device="cpu")


def scorer(labels: int = 1) -> CrossEncoder:
    folder = _bert()
    torch.manual_seed(0)
    return CrossEncoder(folder, num_labels=labels, device="cpu")


def _made(
    folder: str, given: dict[str, Any], train: Any, loss: Callable[[Any], Any], held: Any = None, **more: Any
) -> Any:
    """A trainer of an encoder, or of a `scorer`; `loss` makes the loss of the model."""
    model = encoder()
    args = SentenceTransformerTrainingArguments(output_dir=folder, **{**_COMMON, "batch_sampler": InOrder, **given})
    return SentenceTransformerTrainer(
        model=model, args=args, train_dataset=train, eval_dataset=held, loss=loss(model), **more
    )


def _scoring(folder: str, given: dict[str, Any], train: Any, loss: Any, held: Any, **more: Any) -> Any:
    model = scorer()
    args = CrossEncoderTrainingArguments(output_dir=folder, **{**_COMMON, "batch_sampler": InOrder, **given})
    return CrossEncoderTrainer(model=model, args=args, train_dataset=train, eval_dataset=held, loss=loss(model), **more)


def _halves(count: int, *names: str, **label: Any) -> tuple[Dataset, Dataset]:
    """So many rows to train on, and eight others to evaluate."""
    return columns(count, *names, **label), columns(8, *names, first=20, **label)


def _similarity() -> EmbeddingSimilarityEvaluator:
    return EmbeddingSimilarityEvaluator(TEXTS[:8], TEXTS[8:16], SCORES[:8], name="dev", batch_size=4)


def _retrieval() -> InformationRetrievalEvaluator:
    corpus = {str(i): text for i, text in enumerate(TEXTS[:10])}
    queries = {str(i): text for i, text in enumerate(TEXTS[10:14])}
    relevant = {key: {key, str(int(key) + 4)} for key in queries}
    at_k: dict[str, Any] = {name: [3] for name in ("mrr_at_k", "ndcg_at_k", "accuracy_at_k", "map_at_k")}
    return InformationRetrievalEvaluator(queries, corpus, relevant, name="ir", precision_recall_at_k=[3], **at_k)


SCORED = ("sentence1", "sentence2")
RANKED = ("anchor", "positive")


def similarity(folder: str) -> Any:
    """Scores of pairs; an evaluator decides which checkpoint is the best, and it is loaded at the end."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_dev_spearman_cosine"}
    train, held = _halves(16, *SCORED, score=SCORES)
    given = {**best, "greater_is_better": True}
    return _made(folder, given, train, losses.CosineSimilarityLoss, held, evaluator=_similarity())


def ranking(folder: str) -> Any:
    """Batches without labels and without duplicates, prompts, gradient accumulation, an evaluator of retrieval."""
    given = {"gradient_accumulation_steps": 2, "prompts": {"anchor": "the ", "positive": "a "}}
    train, held = _halves(32, *RANKED)
    given["batch_sampler"] = BatchSamplers.NO_DUPLICATES
    evaluators = [_retrieval(), _similarity()]
    return _made(folder, given, train, losses.MultipleNegativesRankingLoss, held, evaluator=evaluators)


def _softmax(model: Any) -> Any:
    torch.manual_seed(1)
    return losses.SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=3)


def classifying(folder: str) -> Any:
    """A loss with weights of its own, which have a learning rate of their own."""
    given = {"learning_rate_mapping": {r"classifier\.": 2e-2}, "weight_decay": 0.1}
    train, held = _halves(16, "premise", "hypothesis", label=[i % 3 for i in range(16)])
    return _made(folder, given, train, _softmax, held)


def _several(folder: str, sampler: MultiDatasetBatchSamplers, **given: Any) -> Any:
    sets = {
        "scores": columns(16, *SCORED, score=SCORES),
        "classes": columns(12, "premise", "hypothesis", label=[i % 3 for i in range(12)]),
    }
    held = {name: each.select(range(6)) for name, each in sets.items()}
    given["multi_dataset_batch_sampler"] = sampler
    return _made(
        folder,
        given,
        DatasetDict(sets),
        lambda model: {"scores": losses.CoSENTLoss(model), "classes": _softmax(model)},
        held,
        evaluator=_similarity(),
    )


def in_turn(folder: str) -> Any:
    prompts = {"scores": "the ", "classes": "a "}
    return _several(folder, MultiDatasetBatchSamplers.ROUND_ROBIN, prompts=prompts)


def in_proportion(folder: str) -> Any:
    """Two data sets in proportion to their sizes; the loss of one of them decides which checkpoint is the best."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_scores_loss", "save_total_limit": 2}
    return _several(folder, MultiDatasetBatchSamplers.PROPORTIONAL, **best)


def triplets(folder: str) -> Any:
    """Batches grouped by label; nothing but an evaluator to evaluate with."""
    given = {"batch_sampler": BatchSamplers.GROUP_BY_LABEL, "learning_rate": 1e-4}
    train = columns(32, "sentence", label=[i % 4 for i in range(32)])
    return _made(folder, given, train, losses.BatchAllTripletLoss, evaluator=_similarity())


def nested(folder: str) -> Any:
    def loss(model: Any) -> Any:
        inner = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)  # computes gradients in pieces
        return losses.MatryoshkaLoss(model, inner, matryoshka_dims=[16, 8])

    train, held = _halves(16, *RANKED)
    return _made(folder, {}, train, loss, held)


def parts(folder: str) -> Any:
    """A loss that returns its parts by name: each is logged."""
    train, held = _halves(16, *RANKED)
    return _made(folder, {}, train, losses.GlobalOrthogonalRegularizationLoss, held)


def streamed(folder: str) -> Any:
    kinds = Features({"sentence1": Value("string"), "sentence2": Value("string"), "score": Value("float32")})
    train, held = _halves(16, *SCORED, score=SCORES)
    given = {"max_steps": 8, "batch_sampler": BatchSamplers.BATCH_SAMPLER}
    return _made(folder, given, train.to_iterable_dataset().cast(kinds), losses.CosineSimilarityLoss, held)


def pairs(folder: str) -> Any:
    """A cross-encoder: batches hold texts, which the loss turns into tokens."""
    evaluator = CrossEncoderCorrelationEvaluator(list(zip(TEXTS[:8], TEXTS[8:16], strict=True)), SCORES[:8], name="dev")
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_dev_spearman", "greater_is_better": True}
    train, held = _halves(16, "query", "answer", label=SCORES)
    return _scoring(folder, best, train, cross_losses.BinaryCrossEntropyLoss, held, evaluator=evaluator)


def negatives(folder: str) -> Any:
    """A cross-encoder on batches without a tensor; gradient accumulation; an evaluator of ranking."""
    samples = [{"query": TEXTS[i], "positive": [TEXTS[i + 9]], "documents": TEXTS[i : i + 10]} for i in range(4)]
    evaluator = CrossEncoderRerankingEvaluator(samples, at_k=3, name="rank", always_rerank_positives=True)
    train, held = _halves(32, "query", "answer", "negative")

    def loss(model: Any) -> Any:
        torch.manual_seed(3)
        return cross_losses.MultipleNegativesRankingLoss(model, num_negatives=None)

    return _scoring(folder, {"gradient_accumulation_steps": 2}, train, loss, held, evaluator=evaluator)


def lists(folder: str) -> Any:
    """A cross-encoder on two data sets: lists of answers, and classes."""
    documents, labels = [TEXTS[i + 3 : i + 6] for i in range(16)], [[1.0, 0.0, float(i % 2)] for i in range(16)]
    ranked = Dataset.from_dict({"query": TEXTS[:16], "docs": documents, "labels": labels})
    sets = {"ranked": ranked, "scored": columns(12, "query", "answer", label=SCORES)}
    held = {name: each.select(range(6)) for name, each in sets.items()}

    def both(model: Any) -> Any:
        return {"ranked": cross_losses.LambdaLoss(model), "scored": cross_losses.BinaryCrossEntropyLoss(model)}

    return _scoring(folder, {"multi_dataset_batch_sampler": "round_robin"}, sets, both, held)


def load_encoder(folder: str) -> Any:
    return SentenceTransformer(folder, device="cpu")


def load_scorer(folder: str) -> Any:
    return CrossEncoder(folder, device="cpu")


def look(trainer: Any) -> dict[str, Any]:
    """What the log does not say: encodings of the saved model, weights of the losses, the best step, the model card."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_model(folder)
        trainer.create_model_card()
        if not trainer.is_world_process_zero():  # the others save nothing
            return {}
        again = type(trainer.model)(folder, device="cpu")
    data = trainer.model.model_card_data
    each_loss = trainer.loss if isinstance(trainer.loss, dict) else {"loss": trainer.loss}
    return {
        "encoded": float(abs(_encode(trainer.model) - _encode(again)).max()),
        "weights": {
            f"{key}.{name}": float(weight.double().norm())
            for key, loss in each_loss.items()
            for name, weight in loss.named_parameters()
        },
        "best": trainer.state.best_global_step,
        "card": Path(trainer.args.output_dir, "README.md").read_text(encoding="utf-8").startswith("---"),
        "curve": [sorted(entry) for entry in data.training_logs],
        "settings": sorted(data.non_default_hyperparameters),
    }


def _encode(model: Any) -> Any:
    if hasattr(model, "encode"):
        return model.encode(TEXTS[:6])
    return model.predict(list(zip(TEXTS[:6], TEXTS[6:12], strict=True)))


def _case(name: str, build: Callable[[str], Any]) -> Case:
    load = load_scorer if name.startswith("CrossEncoder") else load_encoder
    return Case(name, build, load, look=look)


CASES = [
    _case("SentenceTransformerTrainer, pairs with a score", similarity),
    _case("SentenceTransformerTrainer, ranking with prompts", ranking),
    _case("SentenceTransformerTrainer, a loss with weights", classifying),
    _case("SentenceTransformerTrainer, data sets in turn", in_turn),
    _case("SentenceTransformerTrainer, data sets in proportion", in_proportion),
    _case("SentenceTransformerTrainer, triplets", triplets),
    _case("SentenceTransformerTrainer, nested losses", nested),
    _case("SentenceTransformerTrainer, a loss of several parts", parts),
    _case("SentenceTransformerTrainer, streaming", streamed),
    _case("CrossEncoderTrainer, pairs", pairs),
    _case("CrossEncoderTrainer, negatives", negatives),
    _case("CrossEncoderTrainer, lists and pairs", lists),
]
