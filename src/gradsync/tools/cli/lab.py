"""``gradsync lab``: hosts with shaped links on this machine, or ranks that share its GPU, and programs run on them."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.tools.cli.failure_message import refusing
from gradsync.tools.lab.gpu import SharedGpu, SharedGpuPlan
from gradsync.tools.lab.lab import Lab, LabPlan, Rate, take_down
from gradsync.tools.lab.system import check_fit, lab_names

__all__ = ["lab"]

UNSHAPED = "none"
COLUMNS = ("Host", "Address", "Rate", "Link", "Processes")

lab = typer.Typer(
    help="Emulate hosts with slow links (needs root), or share a GPU among ranks, and run programs there.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _checked_name(name: str | None) -> str | None:
    if name is not None:
        with refusing("--name"):
            LabPlan(name=name)
    return name


Name = Annotated[str, typer.Option(callback=_checked_name, help="Name of the lab; several may be up.")]
HostIndex = Annotated[int, typer.Argument(min=0, help="Number of the host, from 0.", show_default=False)]


@lab.command()
def up(
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 2,
    rate: Annotated[
        str, typer.Option(help="Rate of each link in both directions: 400mbit, 2.5gbit, 50MB/s, or none for no limit.")
    ] = "1gbit",
    delay: Annotated[
        float, typer.Option(min=0, max=10_000, help="Milliseconds that a packet takes from one host to another.")
    ] = 0.0,
    loss: Annotated[float, typer.Option(help="Share of the packets that are lost, such as 0.01.")] = 0.0,
    name: Name = "default",
) -> None:
    """Create a lab. It stays up until gradsync lab down."""
    with refusing("--hosts"):
        LabPlan(hosts=hosts)
    with refusing("--rate"):
        chosen = None if rate == UNSHAPED else Rate.parse(rate)
    with refusing("--loss"):
        plan = LabPlan(name=name, hosts=hosts, rate=chosen, delay=delay / 1000, loss=loss)
    _show(Lab.up(plan))


@lab.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.", show_default=False)],
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Processes on each host.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which the ranks are ended.")] = 86400.0,
    name: Name = "default",
) -> None:
    """Run a command on all hosts, once per rank, with torchrun's environment variables.

    The output of rank 0 is shown, and that of any other rank if it fails. The exit code is that of the rank that fails
    first.
    """
    raise typer.Exit(Lab.find(name).run(command, ranks_per_host=ranks_per_host, timeout=timeout))


@lab.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def gpu(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.", show_default=False)],
    ranks: Annotated[int, typer.Option(help="Processes that share the GPU.")] = 2,
    mps: Annotated[
        bool, typer.Option("--mps", help="Run kernels of different ranks side by side, under a private MPS daemon.")
    ] = False,
    gpu: Annotated[int, typer.Option(help="Number of the GPU, from 0.")] = 0,
    channels: Annotated[int, typer.Option(help="Maximum number of NCCL channels.")] = 2,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which the ranks are ended.")] = 86400.0,
) -> None:
    """Run a command as several NCCL ranks on one GPU, with torchrun's environment variables. Does not need root.

    Each rank sees a single GPU, number 0, and appears to be alone on its host; NCCL connects ranks with sockets over
    loopback. Without --mps, ranks take turns on the GPU, which reveals missing synchronization. With --mps they run
    side by side, which is better for measuring. All ranks share the memory of the GPU. Nothing is left behind.
    """
    for option, value in (("ranks", ranks), ("gpu", gpu), ("channels", channels)):
        with refusing(f"--{option}"):
            SharedGpuPlan(**{option: value})  # type: ignore[arg-type]
    with SharedGpu(SharedGpuPlan(ranks=ranks, gpu=gpu, mps=mps, channels=channels)) as shared:
        raise typer.Exit(shared.run(command, timeout=timeout))


@lab.command()
def status(
    name: Annotated[
        str | None, typer.Option(callback=_checked_name, help="Name of the lab. Default: all labs.")
    ] = None,
) -> None:
    """Show hosts, their addresses, and the state and rate of their links."""
    check_fit()
    names = lab_names() if name is None else [name]
    if not names:
        print("No lab is up. Make one with: gradsync lab up")
    for each in names:
        try:
            _show(Lab.find(each))
        except GradsyncError as error:
            if name is not None:
                raise
            # Of several labs the others are shown.
            print(f"gradsync: {error}", file=sys.stderr)


@lab.command()
def rate(
    rate: Annotated[str, typer.Argument(help="400mbit, 2.5gbit, 50MB/s, or none for no limit.", show_default=False)],
    name: Name = "default",
) -> None:
    """Change the rate of all links while they are up."""
    chosen = None if rate == UNSHAPED else Rate.parse(rate)
    found = Lab.find(name)
    found.set_rate(chosen)
    _show(found)


@lab.command()
def cut(host: HostIndex, name: Name = "default") -> None:
    """Disconnect a host, as if its cable were pulled."""
    Lab.find(name).cut(host)


@lab.command()
def heal(host: HostIndex, name: Name = "default") -> None:
    """Reconnect a host."""
    Lab.find(name).heal(host)


@lab.command()
def down(name: Name = "default") -> None:
    """Remove a lab and end everything that runs in it, no matter which process created it."""
    if not take_down(name):
        others = ", ".join(lab_names())
        raise ConfigurationError(f"the lab {name} is not up" + (f"; these are: {others}" if others else ""))


def _show(found: Lab) -> None:
    links, processes = found.links(), found.processes()
    console, table, plan = Console(highlight=False), Table(*COLUMNS, box=None, pad_edge=False), found.plan
    far = f", {plan.delay * 1000:g} ms away, {plan.loss:.1%} of packets lost" if plan.delay or plan.loss else ""
    console.print(Text(f"Lab {plan.name}: {len(found.hosts)} hosts{far}", style="bold"))
    for host in found.hosts:
        link, state = links[host.index], Text("up") if links[host.index].up else Text("cut", style="bold red")
        table.add_row(host.name, host.address, str(link.rate or "unshaped"), state, str(len(processes[host.index])))
    console.print(table)
