"""Messages about how a run ended: to a chat, by e-mail, to a webhook, or through a block of Prefect.

A spec names places and holds none: the address of each is in a variable of the environment, or in a block of Prefect,
because it is a secret as a rule. Addresses are those of Apprise (https://github.com/caronc/apprise/wiki), which sends.
A message that cannot be sent is a warning; it never fails a run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer_lib.errors import ConfigError, first_line
from trainer_lib.secrets import mask
from trainflow.tasks.tracking.notify_settings import BLOCK, NotifySettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Message:
    """A message to send.

    Attributes:
        state: how it ended: finished, failed, stopped.
        lines: what else there is to know.
    """

    state: str
    subject: str
    lines: Sequence[str]


def check_places(settings: NotifySettings) -> None:
    """Refuse places that no message could reach. Nothing is sent, and blocks are looked at only when one is.

    Raises:
        ConfigError: a variable is not set, or does not hold an address that Apprise knows.
    """
    for place in settings.to:
        if place.startswith(BLOCK):
            continue
        address = os.environ.get(place)
        if not address:
            raise ConfigError(
                "This variable of the environment is not set; it holds the address that messages go to.",
                field="notify.to",
                value=place,
                remedy=f"Set it (export {place}=slack://…), or remove it here.",
            )
        if _apprise().Apprise.instantiate(address, suppress_exceptions=True) is None:
            raise ConfigError(
                "The variable does not hold an address that Apprise knows.",
                field="notify.to",
                value=place,
                remedy="Give slack://…, mailto://…, json://host/path or another one of its services.",
            )


def send(settings: NotifySettings, message: Message) -> None:
    """Send a message to every place, if the settings ask for one about such an end. Never raises."""
    if message.state not in settings.on:
        return
    subject, body = mask(message.subject), mask("\n".join(message.lines))
    for place in settings.to:
        try:
            sent = _send_by_block(place, subject, body) if place.startswith(BLOCK) else _send(place, subject, body)
        except Exception as error:  # how a run ended must not depend on it
            _log.warning("The message to %s could not be sent: %s", place, mask(first_line(error)))
            continue
        if not sent:
            _log.warning("The message to %s could not be sent: its service did not take it.", place)


def _send(place: str, subject: str, body: str) -> bool:
    to = _apprise().Apprise()
    to.add(os.environ.get(place, ""))
    return bool(to.notify(title=subject, body=body))


def _apprise() -> Any:
    import apprise

    # Its own log shows addresses, which are secrets.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    return apprise


def _send_by_block(place: str, subject: str, body: str) -> bool:
    from prefect.blocks.core import Block

    load: Any = Block.load
    load(place.removeprefix(BLOCK), _sync=True).notify(body, subject=subject, _sync=True)
    return True
