"""Prefect's client for calls that no work waits for: each request is sent once, under the settings of the moment."""

from __future__ import annotations

from typing import Any

from tasks.prefect_client import _tls_context, quick_client
from tasks.prefect_internals import without_retries


def test_requests_are_sent_once_under_the_settings_of_the_moment() -> None:
    from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

    for url in ("http://127.0.0.1:1/api", "http://127.0.0.1:2/api"):
        with temporary_settings({PREFECT_API_URL: url}):
            with without_retries():
                first = get_current_settings()
                assert (first.api.url, first.client.max_retries) == (url, 0)
            assert get_current_settings().client.max_retries > 0
            with without_retries():
                assert get_current_settings() is first, "made once: it takes a tenth of a second"


def test_certificates_are_read_once_for_settings_that_are_equal() -> None:
    from prefect.settings import PREFECT_API_TLS_INSECURE_SKIP_VERIFY, PREFECT_API_URL, temporary_settings

    def checks_hosts() -> bool:
        with quick_client() as client:
            transport: Any = client._client._transport
            return bool(transport._pool._ssl_context.check_hostname)

    with temporary_settings({PREFECT_API_URL: "https://127.0.0.1:1/api"}):
        first = _tls_context()
        assert _tls_context() is first, "it takes 30 ms"
        assert checks_hosts()
        with temporary_settings({PREFECT_API_TLS_INSECURE_SKIP_VERIFY: True}):
            assert not checks_hosts()
