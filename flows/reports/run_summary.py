"""The summary of a run as Markdown: what ran, and where everything is. Prefect and MLflow show it."""

from __future__ import annotations

import re

from trainer_lib.base.foreign_text import to_markdown
from trainer_lib.secrets import mask
from trainflow.flows.records.results import PipelineResult
from trainflow.tasks.stage.progress import duration


def summarize(result: PipelineResult) -> str:
    """Stages with their times and reasons, warnings about the data, then the places of the results."""
    ended = "done" if result.error is None else f"{type(result.error).__name__}: {result.error}"
    lines = [f"# {_text(result.name)}: {_text(ended)}", "", "| stage | | time | why |", "|---|---|---:|---|"]
    for each in result.stages:
        took = duration(each.seconds) if each.seconds >= 0.5 else ""
        lines.append(f"| {each.stage} | {each.status} | {took} | {_text(each.reason)} |")
    found = [(outcome.manifest or {}).get("meta", {}).get("warnings") for outcome in result.stages]
    warnings = [f"- warning: {_text(str(text))}" for each in found if isinstance(each, list) for text in each]
    lines += ["", *warnings] if warnings else []
    places = {label: url for outcome in result.stages for label, url in outcome.places.items()}
    places |= {"report": result.report_url or "", "MLflow run": result.run_url or _mlflow_words(result)}
    lines += ["", *(f"- {label}: {_link(url)}" for label, url in places.items() if url)]
    return "\n".join(lines)


def _mlflow_words(result: PipelineResult) -> str:
    where = f"{result.mlflow_run_id} in {result.tracking_uri}; trainflow ui --storage {result.storage}"
    return where if result.mlflow_run_id else ""


def _link(url: str) -> str:
    return f"[{_text(url)}]({mask(url)})" if re.match(r"https?://\S+$", url) else f"`{mask(url).replace('`', '')}`"


def _text(text: str) -> str:
    return to_markdown(mask(text))
