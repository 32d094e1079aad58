"""`trainflow join`: this machine takes part in the training that another one leads. It runs no pipeline of its own."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from trainer_lib.launch.config import LaunchConfig
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Quiet
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.spec.spec import PipelineSpec

Place = Annotated[str, typer.Argument(metavar="HOST:PORT", help="The leading machine's rendezvous.")]


def join(
    rendezvous: Place,
    node_rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of this machine; in order of arrival if unset.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Workers here; one per GPU, or two, if unset.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per worker; shared out if unset.")] = None,
    interface: Annotated[str | None, typer.Option(help="Network interface of the workers' messages.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the leading machine.")] = 600.0,
    quiet: Quiet = False,
) -> None:
    """Take part in a training on several machines, until it is done. Another machine runs the pipeline and leads.

    The recipe and the storage must exist here under the same names.
    """
    config = LaunchConfig(
        rendezvous=rendezvous,
        node_rank=node_rank,
        processes=processes or "auto",
        threads=threads,
        interface=interface,
        join_timeout_s=timeout,
    )
    follow(config, terminal.console(quiet=quiet))


def follow(config: LaunchConfig, out: Console) -> None:
    """Follow the leading machine to the end.

    Raises:
        TrainflowError: the failure that ended the training, or no machine led within the timeout.
    """
    # Here, because it brings the guard and the arguments, which `trainflow --help` does not need.
    from trainer_lib.launch import follow, require_torch

    require_torch()
    with stoppable(out.print, remedy="The same command takes part again."):
        out.print(f"taking part in what {config.rendezvous} leads")
        follow(config, on_line=lambda line: out.print(line, markup=False, highlight=False))
        out.print("done")


def follower_config(spec: PipelineSpec) -> LaunchConfig | None:
    """How this machine takes part in a training that another one leads; None when this machine leads.

    The spec decides, or the environment of the launcher (Slurm, torchrun) that started this process.
    """
    # The resolver keeps both answers: the run that follows asks for them again.
    resolver = spec.resolver
    config = resolver.launch(spec.train.launch, use_cpu=resolver.arguments(spec.train.args).use_cpu)
    return config if config.follows else None
