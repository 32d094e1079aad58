"""One Prefect API for all flow tests: the embedded server that trainflow's own commands use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """The URL of Prefect's API, in place for the rest of the session."""
    from flows.engine import prefect_api, quiet_environment

    quiet_environment()
    with prefect_api() as url:
        from prefect import flow, task

        @task
        def first() -> int:
            return 1

        @flow(name="warm-up")
        def warm_up() -> int:
            return first()

        warm_up()  # Prefect's background threads start here, not in the first test that would be blamed for them
        yield url
