"""Messages about how a run ended: which places are taken, and what is sent when."""

from __future__ import annotations

import logging

import pytest

from flows.results import PipelineResult, StageOutcome
from flows.run_message import describe_run, tell_of_run
from flows.spec.spec import parse_spec
from tasks.notify_settings import NotifySettings
from tasks.notifying import Message, check_places, send
from trainer_lib.errors import CodeError, ConfigError, Interrupted, Pruned

SECRET = "json://user:hunter2-secret@127.0.0.1:9/hook"


@pytest.mark.parametrize(
    "place", ["slack://a/b/c", "https://hooks.slack.com/x", "team_chat", "block:teamchat", "9LIVES"]
)
@pytest.mark.parametrize("form", ["a list", "a text", "a mapping", "the section"])
def test_an_address_in_a_spec_is_refused_and_not_repeated(place: str, form: str) -> None:
    to = {"a list": [place], "a text": place, "a mapping": {place: place}, "the section": None}[form]
    with pytest.raises(ConfigError) as caught:
        parse_spec({"name": "toy", "recipe": "recipe.py", "notify": place if to is None else {"to": to}})
    assert "notify" in str(caught.value)
    assert place not in str(caught.value) + str(caught.value.to_record())
    if form in ("a list", "a text"):
        assert "TEAM_CHAT" in str(caught.value.remedy)


def test_a_variable_that_is_not_set_or_holds_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = NotifySettings(to=["TEAM_CHAT", "block:slack-webhook/team"])
    monkeypatch.delenv("TEAM_CHAT", raising=False)
    with pytest.raises(ConfigError, match="is not set"):
        check_places(settings)
    monkeypatch.setenv("TEAM_CHAT", "hunter2-secret")
    with pytest.raises(ConfigError, match="Apprise knows") as caught:
        check_places(settings)
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("TEAM_CHAT", SECRET)
    check_places(settings)


def test_a_place_that_does_not_answer_is_a_warning_without_the_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEAM_CHAT", SECRET)
    with caplog.at_level(logging.DEBUG):
        send(NotifySettings(to=["TEAM_CHAT"]), Message("failed", "toy failed", ["train: failed"]))
    assert "The message to TEAM_CHAT could not be sent" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_message_says_what_failed_and_how_to_go_on() -> None:
    result = PipelineResult("toy", "0123456789abcdef77", "store", run_name="toy-1", report_url="store/r.html")
    result.stages = [StageOutcome("prepare-data", "ran", "", 3.0), StageOutcome("predict", "skipped", "")]
    result.error = CodeError("ValueError: no", remedy="Correct it.")
    message = describe_run(result)
    assert (message.state, message.subject) == ("failed", "toy-1 failed")
    assert message.lines == [
        "prepare-data: ran, 3 s",
        "your code raised: ValueError: no",
        "Correct it.",
        "Report: store/r.html",
        "Go on: trainflow resume 0123456789abcdef --storage store",
    ]


def test_only_the_ends_that_are_asked_for_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def note(place: str, subject: str, body: str) -> bool:
        sent.append(subject)
        return True

    monkeypatch.setattr("tasks.notifying._send", note)
    ran = [StageOutcome("train", "ran", "", 1.0)]
    ends = {
        "done": PipelineResult("done", "", "s", stages=ran),
        "cached": PipelineResult("cached", "", "s", stages=[StageOutcome("train", "cached", "")]),
        "stopped": PipelineResult("stopped", "", "s", error=Interrupted("Ctrl-C.")),
        "pruned": PipelineResult("pruned", "", "s", error=Pruned("Others were better.")),
        "failed": PipelineResult("failed", "", "s", error=CodeError("no")),
    }
    for result in ends.values():
        tell_of_run(NotifySettings(to=["TEAM_CHAT"]), result)
    assert sent == ["done finished", "failed failed"]
    for result in ends.values():
        tell_of_run(NotifySettings(to=["TEAM_CHAT"], on=["stopped"]), result)
    assert sent[2:] == ["stopped stopped"]
