"""Prefect's client for calls that no work waits for: each ends within seconds, answered or not.

Prefect's own client repeats a request that fails for a minute, and waits a minute for each answer. That suits the start
of a flow; a stage at work must not stand still because the server does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tasks.prefect_internals import without_retries

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

LIMIT_S = 3.0
"""Seconds that one request may take."""


@contextlib.contextmanager
def quick_client(limit_s: float = LIMIT_S) -> Iterator[SyncPrefectClient]:
    """Open a client whose requests end within `limit_s` seconds and are not repeated; a failed one raises.

    Raises:
        httpx.HTTPError: the server did not answer in time, or refused the request.
    """
    from prefect.client.orchestration import get_client

    with (
        without_retries(),
        get_client(sync_client=True, httpx_settings={"timeout": limit_s}) as client,
    ):
        yield client
