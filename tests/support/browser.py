"""A page in a headless browser, over Chromium's own protocol: what it shows, what it asks for, and a picture of it."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import itertools
import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Page:
    """A tab. `asked` are the addresses that it requested."""

    def __init__(self, connection: Any) -> None:
        self.asked: list[str] = []
        self._connection = connection
        self._numbers = itertools.count(1)
        for domain in ("Page", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=30))
            if message.get("method") == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
            if message.get("id") == number:
                return dict(message.get("result", {}))

    def open(self, url: str, *, width: int = 1280, dark: bool = False) -> None:
        """Load an address, on a screen of that width."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        wanted = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[wanted])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Wait until an expression is true, and return it."""
        deadline = time.monotonic() + 30
        while not (found := self.evaluate(script)):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)
        return found

    def picture(self, to: Path) -> None:
        """Write what is seen as PNG."""
        to.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The files of a folder on a free port of this machine; yields the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Page]:
    """A new tab of a browser that reaches this machine alone; its profile is a folder that is not there yet."""
    program = next(found for name in BROWSERS if (found := shutil.which(name)))
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "about:blank",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            place = profile / "DevToolsActivePort"
            deadline = time.monotonic() + 60
            while not place.exists() or not place.read_text().strip():
                assert process.poll() is None, "the browser ended"
                assert time.monotonic() < deadline, "the browser does not start"
                time.sleep(0.05)
            port = place.read_text().splitlines()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                tab = next(each for each in json.load(answer) if each["type"] == "page")
            with connect(tab["webSocketDebuggerUrl"], max_size=1 << 26) as connection:
                page = Page(connection)
                yield page
                page.call("Browser.close")
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
