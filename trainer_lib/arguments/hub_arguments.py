"""Arguments about publishing to a model hub."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.enums import HubStrategy
from trainer_lib.arguments.fields import arg


@dataclass
class HubArguments:
    """Where and when the model is pushed."""

    push_to_hub: bool = arg(False, "Push the model to the hub while training and at the end.", affects="nothing")
    hub_model_id: str | None = arg(
        None,
        'Repository: "name", "owner/name", or a folder\'s fsspec URL; the name of output_dir when not given.',
        affects="nothing",
    )
    hub_strategy: HubStrategy | str = arg(
        "every_save",
        "What is pushed: end = the model, once; every_save = the model at every save; checkpoint = also the newest "
        "checkpoint, as last-checkpoint/; all_checkpoints = also every checkpoint.",
        affects="nothing",
    )
    # `to_dict` writes <HUB_TOKEN> in its place, and reading that back gives None.
    hub_token: str | None = arg(
        None, "Access token; that of the login when not given. Never written anywhere.", affects="nothing", secret=True
    )
    hub_private_repo: bool | None = arg(
        None, "Create the repository private; the owner's default when not given.", affects="nothing"
    )
    hub_always_push: bool = arg(
        False, "Push even while an earlier push is under way; otherwise that save is not pushed.", affects="nothing"
    )
    hub_revision: str | None = arg(
        None, "Branch, tag or commit to push to; the main branch when not given.", affects="nothing"
    )
