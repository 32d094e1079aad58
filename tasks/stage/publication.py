"""A pipeline's publication: its address, and whether an earlier one is still there."""

from __future__ import annotations

from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.hub.transport import open_hub
from trainer_lib.storage import Store
from trainflow.tasks.configs import PublishConfig
from trainflow.tasks.stage import progress as _progress
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PublishFacts
from trainflow.tasks.stage.manifest import StageManifest


def publication_target(config: PublishConfig, context: StageContext) -> str:
    """The address that the pipeline publishes to: that of the spec, else a folder below the storage."""
    # The key has its own form of this, without the storage's path (`publish_key`).
    return config.to or Store.open(context.storage).child("hub", context.name).url


def find_publication_problem(
    config: PublishConfig, context: StageContext, manifest: StageManifest[PublishFacts]
) -> str | None:
    """The damage of an earlier publication; None if it is intact, or if its hub cannot be reached.

    A publication that was found intact is not read again by the same command.
    """
    facts, to = manifest.facts, publication_target(config, context)

    def look() -> str | None:
        hub = open_hub(to, revision=config.revision, private=config.private)
        try:
            is_there = hub.holds(facts.revision, facts.published_digest)
        except (StorageError, ConfigError) as error:  # the manifest is trusted
            message = f"{to} could not be asked whether the publication is still there: {error.message}"
            _progress.publish({"event": "warning", "stage": manifest.stage, "message": message})
            return None
        return None if is_there else f"{facts.published_url} is gone, or not as it was published"

    return context.resolver.inspect_once(("publication", to, facts.revision, facts.published_digest), look)
