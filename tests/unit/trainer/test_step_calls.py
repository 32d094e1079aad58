"""How many calls an optimizer step makes: a number that does not depend on the machine."""

from __future__ import annotations

from benchmarks.step_overhead import MOST_CALLS, by_trainer, count_calls


def test_a_step_makes_few_calls_and_the_same_number_on_every_run() -> None:
    calls = count_calls(by_trainer, 1)
    assert calls["all"] <= MOST_CALLS
    assert count_calls(by_trainer, 1) == calls
