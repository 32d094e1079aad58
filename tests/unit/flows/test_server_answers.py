"""A Prefect server that answers, and refuses: the error names the server and the setting."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import httpx
import pytest

from flows.server.answers import reachable, require_answer
from trainer_lib.errors import ConfigError, InfrastructureError


class _Refuses(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """As Prefect's server with PREFECT_SERVER_API_AUTH_STRING: only its health needs no login."""
        self.send_response(200 if self.path == "/api/health" else 401)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def api() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refuses)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/api"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_wrong_login_is_refused_before_anything_starts(api: str) -> None:
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    with (
        temporary_settings({PREFECT_API_URL: api, PREFECT_API_AUTH_STRING: "me:wrong-word"}),
        pytest.raises(ConfigError, match="refuses the login: the answer is 401") as refused,
    ):
        require_answer(api)
    assert refused.value.field == "PREFECT_API_AUTH_STRING"
    assert "PREFECT_SERVER_API_AUTH_STRING" in str(refused.value.remedy)
    assert "wrong-word" not in f"{refused.value} {refused.value.details}"


def test_a_request_that_the_server_refuses_later_names_the_server(api: str) -> None:
    with pytest.raises(InfrastructureError, match="refused a request: the answer is 401") as refused, reachable(api):
        httpx.get(f"{api}/flows").raise_for_status()
    assert refused.value.value == api
    other = api.replace("/api", "/elsewhere")
    with pytest.raises(httpx.HTTPStatusError), reachable(api):
        httpx.get(other).raise_for_status()
