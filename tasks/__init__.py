"""WALLS: one file per stage, each an ordinary Prefect task that commits a manifest and returns it."""
