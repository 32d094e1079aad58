"""Prefect's client for calls that no work waits for: each ends within seconds, answered or not.

Prefect's own client repeats a request that fails for a minute, and waits a minute for each answer. That suits the start
of a flow; a stage at work must not stand still because the server does.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainflow.tasks.prefect.prefect_internals import without_retries

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

    chosen = {"timeout": limit_s, "verify": _tls_context()}
    with without_retries(), get_client(sync_client=True, httpx_settings=chosen) as client:
        yield client


def _tls_context() -> ssl.SSLContext:
    """Remember the client's SSL context: Prefect reads the certificates each time, which takes 30 ms."""
    from prefect.settings import get_current_settings

    settings = get_current_settings().api
    return _read_certificates(settings.ssl_cert_file, is_checked=not settings.tls_insecure_skip_verify)


@functools.lru_cache
def _read_certificates(path: str | None, *, is_checked: bool) -> ssl.SSLContext:
    import certifi

    context = ssl.create_default_context(cafile=path or certifi.where())
    if not is_checked:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
