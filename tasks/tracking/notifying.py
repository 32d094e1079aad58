"""notify: messages about how a run ended, to a chat, by e-mail, to a webhook, or through a block of Prefect.

A spec names places and holds none: the address of each is in a variable of the environment, or in a block of Prefect,
because it is a secret as a rule. Addresses are those of Apprise (https://github.com/caronc/apprise/wiki), which sends.
A message that cannot be sent is a warning; it never fails a run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trainer_lib.errors import ConfigError, first_line
from trainer_lib.secrets import mask
from trainflow.tasks.settings import Settings

BLOCK = "block:"
End = Literal["finished", "failed", "stopped"]
_log = logging.getLogger(__name__)


class Message(NamedTuple):
    """A message to send: how it ended, and what else there is to know."""

    state: End
    subject: str
    lines: Sequence[str]


def _read_place(place: str) -> str:
    name = place.removeprefix(BLOCK)
    is_variable = name == place and name.isupper() and name.replace("_", "a").isalnum() and not name[0].isdigit()
    if is_variable or (name != place and name.count("/") == 1):
        return place
    what = "This is not the name of a place; an address is a secret, and specs are stored and shown."
    hint = (
        "Set a variable of the environment to the address, and write its name (TEAM_CHAT); or name a block of Prefect "
        "(block:slack-webhook/team)."
    )
    raise PydanticCustomError("place", "{problem} {hint}", {"problem": what, "hint": hint})


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class NotifySettings(Settings):
    """notify: who learns how a run ended."""

    to: Annotated[list[Annotated[str, AfterValidator(_read_place)]], BeforeValidator(_as_list)] = Field(
        default_factory=list,
        description="Variables of the environment that hold an address of Apprise (TEAM_CHAT), or blocks of Prefect "
        "(block:slack-webhook/team).",
    )
    on: Annotated[list[End], BeforeValidator(_as_list)] = Field(
        default_factory=lambda: ["finished", "failed"],  # type: ignore[arg-type]
        description="Ends that send a message: finished, failed, stopped (Ctrl-C, a signal, a cancel).",
    )

    def check(self) -> None:
        """Refuse variables that are not set, or hold no address that Apprise knows; nothing is sent."""
        for place in self.to:
            if place.startswith(BLOCK):  # looked at only when a message is sent
                continue
            address, what = os.environ.get(place), "The variable does not hold an address that Apprise knows."
            if not address:
                what = "This variable of the environment is not set; it holds the address that messages go to."
            elif _apprise().Apprise.instantiate(address, suppress_exceptions=True) is not None:
                continue
            remedy = f"Set it (export {place}=slack://…, mailto://… or json://host/path), or remove it here."
            raise ConfigError(what, field="notify.to", value=place, remedy=remedy)

    def send(self, message: Message) -> None:
        """Send a message to every place, if one about such an end is asked for. Never raises."""
        if message.state not in self.on:
            return
        subject, body = mask(message.subject), mask("\n".join(message.lines))
        for place in self.to:
            try:
                is_sent = _send(place, subject, body)
            except Exception as error:  # how a run ended must not depend on it
                _log.warning("The message to %s could not be sent: %s", place, mask(first_line(error)))
                continue
            if not is_sent:
                _log.warning("The message to %s could not be sent: its service did not take it.", place)


def _send(place: str, subject: str, body: str) -> bool:
    if place.startswith(BLOCK):
        from prefect.blocks.core import Block

        load: Any = Block.load
        load(place.removeprefix(BLOCK), _sync=True).notify(body, subject=subject, _sync=True)
        return True
    to = _apprise().Apprise()
    to.add(os.environ.get(place, ""))
    return bool(to.notify(title=subject, body=body))


def _apprise() -> Any:
    import apprise

    # Its own log shows addresses, which are secrets.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    return apprise
