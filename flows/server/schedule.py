"""When a deployment runs by itself: by cron, at an interval or by an RRule, or on new data.

A schedule is checked before Prefect's server sees it. New data are found by a look at a folder or URL every minute.
What is compared is the digest of the listing: names, sizes and the store's content tags (on a disk, times of change).
The first look starts nothing; it notes what is there. A change starts a run once two looks in a row agree on it, so not
while an upload is under way. The note lies on the pipeline's storage, so nothing is missed or done twice over restarts:
it is written after the run was created, under a key by which Prefect creates the same run once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from trainer_lib.base.durations import FORMS, describe, find_problem, read_seconds
from trainer_lib.base.json_text import parse_record
from trainer_lib.base.paths import expand_home, is_path
from trainer_lib.base.suggestions import suggestion
from trainer_lib.data.rows.row_sources import is_hidden
from trainer_lib.errors import ConfigError, StorageError, TrainflowError, first_line
from trainer_lib.secrets import mask
from trainer_lib.storage import Store

if TYPE_CHECKING:
    from prefect.schedules import Schedule as PrefectSchedule

    from trainflow.flows.spec.spec import PipelineSpec

_CRON = "Five fields: minute hour day-of-month month day-of-week, such as '0 3 * * *'."
_RRULE = "Write a rule of RFC 5545, such as 'FREQ=WEEKLY;BYDAY=MO,TH;BYHOUR=3;BYMINUTE=0;BYSECOND=0'."
EVERY_S = 60.0
_FOLDER = "watch"
_LIMIT = 4096


@dataclass(frozen=True)
class Schedule:
    """When a deployment runs by itself: by `cron`, by `rrule`, every `interval_s` seconds, or never.

    Raises ConfigError for more than one of them, or an unknown time zone; `prefect` checks whether a rule can be read.
    """

    cron: str | None = None
    interval_s: float | None = None
    timezone: str | None = None
    rrule: str | None = None
    anchor: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        given = {"--cron": self.cron, "--rrule": self.rrule, "--interval": self.interval_s}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            what = f"A schedule is one of {', '.join(chosen[:-1])} and {chosen[-1]}."
            raise ConfigError(what, field=chosen[-1], value=given[chosen[-1]], remedy="Keep one.")
        if self.timezone is not None:
            try:
                ZoneInfo(self.timezone)
            except (ZoneInfoNotFoundError, ValueError, OSError) as error:
                close = suggestion(self.timezone, sorted(available_timezones()), listing=False)
                remedy = f"{close} Names are those of the IANA database, such as Europe/Berlin."
                what = "This time zone does not exist."
                raise ConfigError(what, field="--timezone", value=self.timezone, remedy=remedy) from error

    def __str__(self) -> str:
        if self.cron is not None:
            return f"cron {self.cron} ({self.timezone or 'UTC'})"
        if self.rrule is not None:
            return f"rule {self.rrule} ({self.timezone or 'UTC'})"
        return "no schedule" if self.interval_s is None else f"every {describe(timedelta(seconds=self.interval_s))}"

    def prefect(self) -> PrefectSchedule | None:
        """This schedule as Prefect's own object; None without one. Raises ConfigError if no run would ever start."""
        from prefect.schedules import Cron, Interval, RRule

        # Computed once here, so that a rule without a firing is refused and not deployed.
        if (self.cron, self.rrule, self.interval_s) != (None, None, None) and not self.next_firings(1):
            name, value = ("--cron", self.cron) if self.cron is not None else ("--rrule", self.rrule)
            raise ConfigError(
                "No run would ever start by this schedule.", field=name, value=value, remedy="Give one with a future."
            )
        if self.interval_s is not None:
            return Interval(self.interval_s, timezone=self.timezone, anchor_date=self.anchor)
        if self.rrule is not None:
            return RRule(self.rrule, timezone=self.timezone)
        return None if self.cron is None else Cron(self.cron, timezone=self.timezone)

    def next_firings(self, count: int, after: datetime | None = None) -> list[datetime]:
        """The next times at which a run starts, in the schedule's time zone; none without one. Raises ConfigError."""
        schedule = self._checked()
        if schedule is None:
            return []
        after = after or datetime.now(UTC)
        try:
            dates = asyncio.run(schedule.get_dates(count, start=after))
        except ValueError:  # croniter's answer about the 31st of February
            return []
        return [date.astimezone(ZoneInfo(self.timezone or "UTC")) for date in dates]

    def _checked(self) -> Any:
        """The schedule as Prefect's server computes its dates; None without one."""
        from prefect.server.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule

        zone = self.timezone or "UTC"
        if self.interval_s is not None:
            given = {"interval": self.interval_s, "anchor_date": self.anchor, "timezone": zone}
            return IntervalSchedule.model_validate(given)
        try:
            if self.rrule is not None:
                return RRuleSchedule(rrule=self.rrule, timezone=zone)
            return None if self.cron is None else CronSchedule(cron=self.cron, timezone=zone)
        # dateutil stumbles over some texts.
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            if self.rrule is not None:
                what = "This is not a recurrence rule."
                raise ConfigError(what, field="--rrule", value=self.rrule, remedy=_RRULE) from error
            what = "This is not a schedule in cron's notation."
            raise ConfigError(what, field="--cron", value=self.cron, remedy=_CRON) from error


def read_interval(text: str | None, *, option: str = "--interval", least_s: float = 1.0) -> float | None:
    """Seconds that `text` means ("3600", "1h"); None for None. Raises ConfigError for anything else."""
    if text is None:
        return None
    seconds = read_seconds(text)
    if seconds is None:
        raise ConfigError("This is not a duration.", field=option, value=text, remedy=FORMS)
    problem = find_problem(seconds)
    if problem is None and seconds < least_s:
        problem = f"The duration must be at least {least_s:g} s."
    if problem is not None:
        raise ConfigError(problem, field=option, value=text, remedy=FORMS)
    return seconds


def show_firings(dates: list[datetime]) -> str:
    """``Next: Mon 2026-11-23 03:00:00 CET, …`` in one line."""
    return "Next: " + ", ".join(f"{date:%a %Y-%m-%d %H:%M:%S %Z}" for date in dates) + "."


# -- new data ----------------------------------------------------------------------------------------------------------


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
