"""`trainflow plan`: what a run will do and take, and what of it cannot work, before it is started."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli import plan_text, presentation, terminal
from flows.cli.options import Bare, Debug, Json, Overrides, Spec, print_json
from flows.cli.spec_choice import choose_spec_file
from flows.spec.spec import load_spec
from tasks.stage.resolver import Resolver

ProbeOption = Annotated[
    bool,
    typer.Option("--probe", help="Prepare the data if it is not, train a few real steps, and measure time and memory."),
]


def plan(
    spec: Spec = None,
    overrides: Overrides = None,
    probe: ProbeOption = False,
    bare: Bare = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a run will do and take: stages, steps, memory of a rank, time, room; and what of it cannot work.

    The exit code is 2 if something cannot work.
    """
    parsed = load_spec(*choose_spec_file(spec, overrides), Resolver(), needs_sweep=False)
    from flows.full_plan import plan_in_full
    from flows.plan import Plan

    during = terminal.console(stderr=True, quiet=bare).status
    full = plan_in_full(Plan.of(parsed, debug=debug), probe=probe, during=during)
    if as_json:
        print_json(full.to_dict())
    else:
        terminal.show(presentation.reasons(list(full.plan.reasons.values()), full.warnings), bare=bare)
        terminal.show(plan_text.describe(full.plan, full.forecast, full.obstacles), bare=bare)
    if not full.can_work:
        raise typer.Exit(2)
