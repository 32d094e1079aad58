"""When a deployment runs by itself: by cron, at an interval or by an RRule; checked before Prefect's server sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from trainer_lib.base.durations import FORMS, describe, find_problem, read_seconds
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from prefect.schedules import Schedule as PrefectSchedule

_CRON = "Five fields: minute hour day-of-month month day-of-week, such as '0 3 * * *'."
_RRULE = "Write a rule of RFC 5545, such as 'FREQ=WEEKLY;BYDAY=MO,TH;BYHOUR=3;BYMINUTE=0;BYSECOND=0'."


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
        if self._checked() is not None and not self.next_firings(1):
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
