"""The trainers of sentence-transformers do on our Trainer what they do on that of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import client_table
from tests.support.clients import Runs, run_cases, run_side

pytestmark = [pytest.mark.needs("clients"), pytest.mark.timeout(900)]
ENCODER, SCORER = "SentenceTransformerTrainer", "CrossEncoderTrainer"
# By name: the module of the cases imports the library.
NAMES = [
    f"{ENCODER}, pairs with a score",
    f"{ENCODER}, ranking with prompts",
    f"{ENCODER}, a loss with weights",
    f"{ENCODER}, data sets in turn",
    f"{ENCODER}, data sets in proportion",
    f"{ENCODER}, triplets",
    f"{ENCODER}, nested losses",
    f"{ENCODER}, a loss of several parts",
    f"{ENCODER}, streaming",
    f"{SCORER}, pairs",
    f"{SCORER}, negatives",
    f"{SCORER}, lists and pairs",
]

# Ours writes a class as text and `accelerator_config` as given; theirs changes the pinning where there is no GPU.
SHOWN_OTHERWISE = {"accelerator_config", "batch_sampler", "dataloader_pin_memory"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found = run_cases("sentence-transformers", tmp_path_factory.mktemp("sentence"))
    assert list(found.ours) == NAMES
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_evaluates_saves_resumes_and_loads(name: str, runs: Runs) -> None:
    ours, theirs = runs.ours[name], runs.transformers[name]
    assert (ours["errors"], theirs["errors"]) == ({}, {})
    assert client_table.log_differences(ours["logs"], theirs["logs"]) == []
    assert client_table.resumed_differences(ours) == []
    assert ours["loaded"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_it_saved_encodes_equally_and_its_card_says_the_same(name: str, runs: Runs) -> None:
    (ours, resumed), (theirs, _) = runs.ours[name]["looks"], runs.transformers[name]["looks"]
    assert ours["encoded"] == 0
    assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-3)
    assert resumed["weights"] == pytest.approx(ours["weights"], abs=1e-6)  # those of the loss as well
    for what in ("best", "card", "curve"):
        assert ours[what] == theirs[what], what
    assert set(ours["settings"]) ^ set(theirs["settings"]) <= SHOWN_OTHERWISE


def test_two_processes_log_what_they_log_with_transformers(tmp_path: Path) -> None:
    def train(side: str) -> Any:
        return run_side("sentence-transformers", side, tmp_path / side, only=NAMES[0], processes=2)["outcomes"][
            NAMES[0]
        ]

    ours, theirs = train("ours"), train("transformers")
    assert (ours["errors"], theirs["errors"]) == ({}, {})
    assert client_table.log_differences(ours["logs"], theirs["logs"]) == []
    assert client_table.resumed_differences(ours) == []


@pytest.mark.parametrize("name", NAMES)
def test_its_row_in_the_documentation_is_what_happened(name: str, runs: Runs) -> None:
    row = client_table.row(name, runs.ours[name], runs.transformers[name])
    assert row in client_table.PAGE.read_text(encoding="utf-8").splitlines()


def test_what_the_compatibility_page_says_it_was_tried_with_has_run(runs: Runs) -> None:
    assert client_table.unfounded_claims("sentence-transformers", runs.names) == []
