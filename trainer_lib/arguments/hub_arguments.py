"""Arguments about publishing to a model hub."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.enums import HubStrategy
from trainer_lib.arguments.fields import arg


@dataclass
class HubArguments:
    """Whether, where and when the model is pushed."""

    push_to_hub: bool = arg(False, "Push the model to the hub while training and at the end.", affects="nothing")
    hub_model_id: str | None = arg(
        None,
        'Repository: "name", "owner/name", or an fsspec folder; the output folder\'s name when not given.',
        affects="nothing",
    )
    hub_strategy: HubStrategy | str = arg(
        "every_save",
        "end = once; every_save = the model at every save; checkpoint = and the newest checkpoint as last-checkpoint/; "
        "all_checkpoints = and every checkpoint.",
        affects="nothing",
    )
    hub_token: str | None = arg(
        None, "Access token; the logged-in one when not given. Never written anywhere.", affects="nothing", secret=True
    )
    hub_private_repo: bool | None = arg(
        None, "Create the repository private; the owner's default when not given.", affects="nothing"
    )
    hub_always_push: bool = arg(
        False, "Push even if the push before is not finished; otherwise that save is left out.", affects="nothing"
    )
    hub_revision: str | None = arg(
        None, "Branch, tag or commit to push to; the main branch when not given.", affects="nothing"
    )
