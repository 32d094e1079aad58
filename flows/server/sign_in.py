"""Links that open Prefect's UI without its password prompt.

The embedded server asks for a password (`flows.server.embedded`), which its UI keeps in the browser's storage. A link
to the server's page `SIGN_IN` carries the password behind "#", a part that no browser sends anywhere; the page stores
it and goes on to the UI. The page alone holds no secret, so other users of the machine stay outside.
"""

from __future__ import annotations

import base64
import contextlib
from pathlib import Path

from flows.server import embedded
from trainer_lib.json_text import read_json


def sign_in_link(folder: Path, page: str = "/runs") -> str:
    """The link that opens `page` of the embedded server's UI.

    Args:
        folder: that of the server (`flows.server.api.server_folder`).

    Raises:
        OSError: the server is gone.
    """
    about = read_json(folder / embedded.DESCRIPTION)
    password = base64.b64encode(str(about["auth"]).encode()).decode()
    return f"{about['url']}{embedded.SIGN_IN}#{password}&{page}"


def find_page() -> str | None:
    """The page of a Prefect server that runs already: the configured one, else a living embedded one; None: neither."""
    from prefect.settings import get_current_settings

    from flows.server.membership import is_healthy

    settings = get_current_settings()
    if settings.api.url:
        return str(settings.ui_url or settings.api.url.removesuffix("/api"))
    for path in sorted((settings.home / "trainflow").glob(f"*/{embedded.DESCRIPTION}")):
        with contextlib.suppress(OSError, ValueError, KeyError):  # a server that has just ended
            if is_healthy(str(read_json(path)["url"])):
                return sign_in_link(path.parent)
    return None
