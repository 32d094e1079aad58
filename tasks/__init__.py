"""The stages: one file each, with an ordinary Prefect task that commits a manifest and returns it."""
