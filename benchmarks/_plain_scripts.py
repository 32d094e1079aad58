"""Scripts without a Trainer: scikit-learn for tables and series, a loop in torch for embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks._recipe_jobs import Job
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.recipes.embeddings import find_ranks
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer
from trainer_lib.recipes.time_series_forecasting import compute_metrics

_SCALE = 20.0  # of cosines, as sentence-transformers has it


def classify_table(job: Job) -> float:
    """Standardized columns and logistic regression: accuracy."""
    from sklearn.linear_model import LogisticRegression

    found, labels = _fit_table(job, LogisticRegression(max_iter=1000))
    return float((found == labels).mean())


def estimate_table(job: Job) -> float:
    """Standardized columns and ridge regression: root mean square error."""
    from sklearn.linear_model import Ridge

    found, labels = _fit_table(job, Ridge())
    return float(np.sqrt(((found - labels) ** 2).mean()))


def _fit_table(job: Job, model: Any) -> tuple[Any, Any]:
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    names = [name for name in job.splits["train"][0] if name not in ("labels", "row_id")]
    texts = [place for place, name in enumerate(names) if isinstance(job.splits["train"][0][name], str)]
    numbers = [place for place in range(len(names)) if place not in texts]
    rows = {
        split: np.array([[row[name] for name in names] for row in job.splits[split]], object)
        for split in ("train", "test")
    }
    labels = {split: np.array([row["labels"] for row in job.splits[split]]) for split in rows}
    columns = make_column_transformer((StandardScaler(), numbers), (OneHotEncoder(handle_unknown="ignore"), texts))
    fitted = make_pipeline(columns, model).fit(rows["train"], labels["train"])
    return fitted.predict(rows["test"]), labels["test"]


def forecast(job: Job) -> float:
    """Ridge regression of all steps to come on the steps before, less the last one: MASE."""
    from sklearn.linear_model import Ridge

    parts = {split: job.recipe.collate_with(job.data) for split in ("train", "test")}
    batches = {split: collate(job.splits[split]) for split, collate in parts.items() if collate is not None}
    past = {split: batch["past"].flatten(1).numpy() for split, batch in batches.items()}
    labels = {split: batch["labels"].numpy() for split, batch in batches.items()}
    shape = labels["test"][:, 0].shape
    wanted = labels["train"][:, 0].reshape(len(past["train"]), -1)
    model = Ridge().fit(past["train"] - past["train"][:, -1:], wanted - past["train"][:, -1:])
    found = model.predict(past["test"] - past["test"][:, -1:]) + past["test"][:, -1:]
    return compute_metrics(EvalPrediction(found.reshape(shape), labels["test"]))["mase"]


def embed(job: Job) -> float:
    """The mean of the tokens' vectors, each query against the texts of its batch: mean reciprocal rank."""
    tokenizer, info = kept_tokenizer(job.data), job.data.info
    model = job.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=job.steps)

    def vectors(texts: list[str]) -> torch.Tensor:
        made = tokenizer(texts, padding=True, truncation=True, max_length=info["max_length"], return_tensors="pt")
        mask = made["attention_mask"]
        hidden = model(input_ids=made["input_ids"], attention_mask=mask)[0]
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)

    order = torch.Generator().manual_seed(job.seed)
    train, places = job.splits["train"], torch.empty(0, dtype=torch.int64)
    model.train()
    for _ in range(job.steps):
        if len(places) < job.batch:
            places = torch.randperm(len(train), generator=order)
        rows, places = [train[place] for place in places[: job.batch]], places[job.batch :]
        queries, texts = ([row[info[side]] for row in rows] for side in ("query", "positive"))
        scores = vectors(queries) @ vectors(texts).T * _SCALE
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(rows)))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    model.eval()
    test = job.splits["test"]
    candidates = list(dict.fromkeys(row[info["positive"]] for row in test))
    with torch.no_grad():
        known = torch.cat([vectors(candidates[start : start + 64]) for start in range(0, len(candidates), 64)])
        asked = [row[info["query"]] for row in test]
        own = torch.cat([vectors(asked[start : start + 64]) for start in range(0, len(asked), 64)])
    right = np.array([candidates.index(row[info["positive"]]) for row in test])
    return float((1 / find_ranks((own @ known.T).numpy(), right)).mean())
