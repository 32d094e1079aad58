"""The settings of messages about how a run ended."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trainflow.tasks.configs import Settings

BLOCK = "block:"
End = Literal["finished", "failed", "stopped"]


def _read_place(place: str) -> str:
    name = place.removeprefix(BLOCK)
    is_variable = name == place and name.isupper() and name.replace("_", "a").isalnum() and not name[0].isdigit()
    if is_variable or (name != place and name.count("/") == 1):
        return place
    raise PydanticCustomError(
        "place",
        "{problem} {hint}",
        {
            "problem": "This is not the name of a place; an address is a secret, and specs are stored and shown.",
            "hint": "Set a variable of the environment to the address, and write its name (TEAM_CHAT); "
            "or name a block of Prefect (block:slack-webhook/team).",
        },
    )


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
        """Refuse places that no message could reach. Raises ConfigError."""
        import importlib

        if self.to:
            importlib.import_module("trainflow.tasks.tracking.notifying").check_places(self)  # it brings what sends
