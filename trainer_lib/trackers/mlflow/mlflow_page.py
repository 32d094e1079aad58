"""MLflow's server for one user: `python -P -m trainer_lib.trackers.mlflow.mlflow_page PORT`, started by `trainflow ui`.

MLflow itself answers to every user of the machine. Here a request needs the token: in the address once, which the
browser keeps as a cookie, or as a bearer token, which MLflow's client sends where MLFLOW_TRACKING_TOKEN has it.
"""

from __future__ import annotations

import hmac
import os
import sys
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response

HOST = "127.0.0.1"
TOKEN = "TRAINFLOW_UI_TOKEN"  # noqa: S105  # the name of the variable
ARTIFACTS = "TRAINFLOW_UI_ARTIFACTS"


class Door:
    """An ASGI application that lets requests with the token through to another one."""

    def __init__(self, app: Any, token: str, cookie: str) -> None:
        self._app = app
        self._token = token
        self._cookie = cookie

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 401 without the token; take it out of the address into a cookie."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._fits(request.cookies.get(self._cookie, "")) or self._fits(bearer):
            await self._app(scope, receive, send)
            return
        answer: Response = PlainTextResponse("Open the link that trainflow ui printed; it has the token.\n", 401)
        if self._fits(request.query_params.get("token", "")):
            answer = RedirectResponse(request.url.path, 303)  # the browser keeps what is behind "#"
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(scope, receive, send)

    def _fits(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())


def main(port: int) -> None:
    """Serve the database that MLFLOW_BACKEND_STORE_URI names."""
    import uvicorn
    from mlflow.server import constants

    os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = os.environ["MLFLOW_BACKEND_STORE_URI"]
    os.environ[constants.SERVE_ARTIFACTS_ENV_VAR] = "true"
    os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
    os.environ[constants.ARTIFACTS_DESTINATION_ENV_VAR] = os.environ[ARTIFACTS]
    from mlflow.server.fastapi_app import app  # reads the variables

    door = Door(app, os.environ.pop(TOKEN), f"trainflow-{port}")
    uvicorn.run(door, host=HOST, port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main(int(sys.argv[1]))
