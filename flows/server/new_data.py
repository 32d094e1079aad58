"""New data starts a run: a look at a folder or URL every minute, and a run of the deployment when its listing changes.

What is compared is the digest of the listing: names, sizes and the store's content tags (on a disk, times of change).
The first look starts nothing; it notes what is there. A change starts a run once two looks in a row agree on it, so not
while an upload is under way. The note lies on the pipeline's storage, so nothing is missed or done twice over restarts:
it is written after the run was created, under a key by which Prefect creates the same run once.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.base.json_text import parse_record
from trainer_lib.base.paths import expand_home, is_path
from trainer_lib.data.rows.row_sources import is_hidden
from trainer_lib.errors import ConfigError, StorageError, TrainflowError, first_line
from trainer_lib.secrets import mask
from trainer_lib.storage import Store

if TYPE_CHECKING:
    from trainflow.flows.spec.spec import PipelineSpec

EVERY_S = 60.0
_FOLDER = "watch"
_LIMIT = 4096


@dataclass
class Watch:
    """One watched folder or URL, and the deployment, `pipeline/NAME`, that it starts; its note is on its storage."""

    url: str
    deployment: str
    spec: PipelineSpec
    say: Callable[[str], object]
    _pending: str | None = field(default=None, init=False)
    _trouble: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if is_path(self.url):
            # `serve` changes its working directory.
            self.url = str(expand_home(self.url).absolute())

    def require_listable(self) -> None:
        """Raise ConfigError unless the URL can be listed now."""
        try:
            store = Store.open(self.url, field="--watch")
            if store.is_local and not store.local_path().is_dir():
                raise ConfigError(
                    "There is no such folder.", field="--watch", value=self.url, remedy="Name a folder that exists."
                )
            self._listing()
        except StorageError as error:
            what, address = f"This URL cannot be listed: {error.message}", mask(self.url)
            remedy = "Check the address, the credentials and the network."
            raise ConfigError(what, field="--watch", value=address, remedy=remedy, details=error.details) from error

    def run(self, done: threading.Event, every_s: float = EVERY_S) -> None:
        """Look until `done` is set; whatever is away is waited for, and reported once."""
        while not done.is_set():
            try:
                self.look()
                if self._trouble is not None:
                    self.say(f"{mask(self.url)} is watched again.")
                self._trouble = None
            except Exception as error:
                # A store or a server that is away comes back; this thread must not end over it.
                text = f"{type(error).__name__}: {first_line(error)}"
                if isinstance(error, TrainflowError):
                    text = error.message
                if text != self._trouble:
                    self.say(f"{mask(self.url)} cannot be watched just now, and is tried again: {mask(text)}")
                self._trouble = text
            done.wait(every_s)

    def look(self) -> bool:
        """Start a run if the listing is not the one that was noted, and has settled; whether one was started."""
        found = self._listing()
        note = parse_record(self._notes().read_if_exists(self._name, limit=_LIMIT))
        if note.get("seen") is None:
            self._write_note(found, 0)
            return False
        if found == note["seen"]:
            self._pending = None
            return False
        if found != self._pending:
            self._pending = found  # still changing, for all we know
            return False
        number = int(note.get("started") or 0) + 1
        name = self._start(f"{self.deployment} {self.url} {number} {found}")
        self._write_note(found, number)
        self._pending = None
        self.say(f"New data under {mask(self.url)}: the run {name} starts.")
        return True

    def _start(self, once: str) -> str:
        """Create the run; the same text creates it once, however often it is asked for."""
        from prefect.client.orchestration import get_client

        declared = any(_covers(source, self.url) for source in self.spec.prepare.sources)
        # A source that the spec does not name is in no key: without this prepare-data would stay cached.
        parameters: dict[str, Any] = {} if declared else {"force": ["prepare-data"]}
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name(self.deployment)
            run = client.create_flow_run_from_deployment(
                deployment.id,
                parameters=parameters,
                tags=["new-data"],
                idempotency_key=hashlib.sha256(once.encode()).hexdigest(),
            )
        return run.name

    def _listing(self) -> str:
        store = Store.open(self.url, field="--watch")
        rows = []
        for info in store.list():
            if is_hidden(info.path):
                continue
            tag = info.tag
            if tag is None and store.is_local:
                try:
                    tag = str(store.local_path(info.path).stat().st_mtime_ns)
                except FileNotFoundError:  # deleted meanwhile: the next look sees it
                    continue
            rows.append(f"{info.path}\0{info.size}\0{tag or ''}\n")
        return hashlib.sha256("".join(sorted(rows)).encode("utf-8", "surrogateescape")).hexdigest()

    def _write_note(self, seen: str, started: int) -> None:
        note = {"url": self.url, "deployment": self.deployment, "seen": seen, "started": started}
        self._notes().write_bytes(self._name, json.dumps(note, indent=1).encode())

    def _notes(self) -> Store:
        return Store.open(self.spec.storage).child(_FOLDER)

    @property
    def _name(self) -> str:
        return hashlib.sha256(f"{self.deployment}\0{self.url}".encode()).hexdigest()[:16] + ".json"


def _covers(source: str, url: str) -> bool:
    """Whether a declared source is the watched URL, or lies above it."""
    one, other = (str(Path(text).absolute()) if is_path(text) else text.rstrip("/") for text in (source, url))
    return other == one or other.startswith(f"{one}/")
