"""Many metrics: the seconds of a model card, and of MLflow's link between a run's metrics and its model.

    python -m benchmarks.many_metrics --size full --save

Wanted: linear, so ten times the metrics take about ten times the seconds, and the link of 10,000 takes under 20 s.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks._result import arguments, publish
from trainer_lib.hub.card import Card, render_card
from trainer_lib.trackers.mlflow.mlflow_client import BATCH, Point, connect, send_points
from trainer_lib.trackers.mlflow.mlflow_models import link_metrics

SIZES = {"smallest": (20, 200), "full": (1000, 10_000)}


def measure(number: int, folder: Path) -> dict[str, float]:
    """Return the seconds of each with a number of metrics."""
    values = {f"accuracy_{index}": index / number for index in range(number)}
    start = time.perf_counter()
    render_card(Card("many", metrics={"test": values}))
    card = time.perf_counter() - start
    client = connect(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.create_experiment(str(number))
    run = client.create_run(experiment).info.run_id
    model = client.create_logged_model(experiment, name="many", source_run_id=run).model_id
    points = [Point(f"test/{name}", value, 1, 7) for name, value in values.items()]
    start = time.perf_counter()
    send_points(client, run, points)
    sent = time.perf_counter() - start
    start = time.perf_counter()
    link_metrics(client, run, model, 7, [point.key for point in points])
    linked = time.perf_counter() - start
    if len(client.get_logged_model(model).metrics or ()) != number:
        raise SystemExit(f"Not all of the {number} metrics were linked, {BATCH} a request.")
    return {"card": round(card, 3), "sent": round(sent, 3), "linked": round(linked, 3)}


def main() -> None:
    """Measure both numbers of metrics, and what each takes of the larger beside the smaller."""
    asked = arguments(__doc__, list(SIZES))
    with tempfile.TemporaryDirectory() as folder:
        seconds = {number: measure(number, Path(folder)) for number in SIZES[asked.size]}
    few, many = seconds.values()
    ratio = {name: round(many[name] / max(few[name], 1e-9), 1) for name in few}
    publish("many_metrics", asked.size, {"seconds": seconds, "ratio": ratio}, asked.save)


if __name__ == "__main__":
    main()
