"""Prefect's client for calls that no work waits for: each request is sent once, under the settings of the moment."""

from __future__ import annotations

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
