"""Prints a plan as tables for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from heed.jobs.job_file import load_job
from heed.jobs.plan import Plan, Setting, advice, make_plan, places
from stages.planner import StagePlan
from stages.planning.hardware import GIB, hardware
from stages.planning.memory import Memory
from stages.planning.times import BANDWIDTH_SHARE, LINK_SHARE

MIB = 2**20


@dataclass(frozen=True)
class Machines:
    """The machines that the command assumes.

    `num_nodes` 0 means as many as the workers need, `node_gib` 0 does not check a node's memory, and a negative price
    means the built-in one, as no `network_gbit` per GPU does.
    """

    gpu: str
    num_nodes: int
    gpus_per_node: int
    node_gib: int
    price: float
    network_gbit: float | None = None


def show_plan(
    out: Console,
    path: Path | None,
    overrides: Sequence[str],
    machines: Machines,
    share_of_peak: float | None,
    assumed_rows: int,
) -> bool:
    """Print a job file's plan, verdict first, and changes that make it fit if it does not. Returns whether it fits.

    Raises: ValueError for an invalid job, GPU or number of nodes.
    """
    job = load_job(path, overrides, opens_models=False)
    chosen = hardware(machines.gpu, job.workers, job.engine.resolved_precision())
    if machines.price >= 0:
        chosen = replace(chosen, dollars_per_hour=machines.price)
    if machines.network_gbit is not None:
        chosen = replace(chosen, network_bytes_per_second=machines.network_gbit * 1e9 / 8)
    share = share_of_peak or chosen.usual_share
    nodes = places(machines.num_nodes, machines.gpus_per_node, job.num_ranks) if chosen.is_gpu else 1
    setting = Setting(chosen, share, assumed_rows, machines.gpus_per_node, machines.node_gib * GIB)
    plan = make_plan(job, setting)
    out.print(_verdict_line(plan))
    out.print(_heading(plan, nodes, machines.gpus_per_node))
    for line in advice(path, overrides, plan):
        out.print(line)
    out.print()
    out.print(_summary(plan))
    for stage in plan.stages:
        out.print(f"\n[bold]{stage.name}[/]")
        out.print(_batch_table(stage))
        for kind, memory in stage.memory.items():
            out.print(_memory_table(kind, memory, chosen.memory_bytes))
        if host := _host_line(stage, plan):
            out.print(host)
        for assumption in stage.assumptions:
            out.print(f"  [dim]{escape(assumption)}")
    out.print()
    out.print(f"[dim]{_how(plan)}")
    return plan.fits


def _verdict_line(plan: Plan) -> str:
    """Returns whether the job fits, on what, and the stage that needs most memory."""
    chosen, setting = plan.setting.hardware, plan.setting
    where = chosen.name if chosen.is_gpu else "this machine's CPU"
    largest = max(plan.stages, key=lambda stage: stage.peak)
    of_node = max(plan.stages, key=plan.node_bytes)
    if largest.peak <= chosen.memory_bytes and setting.node_bytes and plan.node_bytes(of_node) > setting.node_bytes:
        return (
            f"{plan.job.name}: [bold red]does not fit[/] on {where}: {of_node.name} needs"
            f" {_size(plan.node_bytes(of_node))} of a node's CPU memory, which has {_size(setting.node_bytes)}"
        )
    return (
        f"{plan.job.name}: {verdict(largest.peak, chosen.memory_bytes)} on {where}: {largest.name} needs most,"
        f" {_size(largest.peak)} of {_size(chosen.memory_bytes)} per worker"
    )


def _heading(plan: Plan, nodes: int, gpus_per_node: int) -> str:
    layout, chosen = plan.layout, plan.setting.hardware
    gpus = min(gpus_per_node, layout.ranks)
    where = f"{_num(nodes, 'node')} x {gpus} {chosen.name}" if chosen.is_gpu else "this machine's CPU"
    return (
        f"{_num(layout.ranks, 'worker')} on {where}, ZeRO {layout.zero_stage}, {'bf16' if layout.is_bf16 else 'fp32'}"
    )


def _num(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _batch_table(stage: StagePlan) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("  unit", stage.unit)
    for name, number in stage.batch.items():
        table.add_row(f"  {name}", f"{number:,}")
    return table


def _memory_table(kind: str, memory: Memory, available: int) -> Table:
    """Returns what is held throughout, then what is added by the phase that needs most."""
    unit = "GiB" if memory.peak >= GIB else "MiB"
    table = Table(f"  memory of a {kind}", unit, box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name, size in memory.held.items():
        table.add_row(f"  {name}", _in(unit, size))
    for name, size in memory.phases[memory.peak_phase].items():
        table.add_row(f"  + {name} [dim]({memory.peak_phase})[/]", _in(unit, size))
    others = [
        f"{name} {_in(unit, sum(parts.values()))}" for name, parts in memory.phases.items() if name != memory.peak_phase
    ]
    table.add_row("  [bold]peak[/]", f"[bold]{_in(unit, memory.peak)}[/]")
    table.add_row(f"  of {_size(available)}", verdict(memory.peak, available))
    if others:
        table.add_row(f"  [dim]other phases: {', '.join(others)}[/]", "")
    return table


def _host_line(stage: StagePlan, plan: Plan) -> str:
    """Returns the memory that a stage takes on a node, with its parts per rank."""
    size, available = plan.node_bytes(stage), plan.setting.node_bytes
    if not size:
        return ""
    listed = [
        f"{name} {_size(part)} per rank" for memory in stage.memory.values() for name, part in memory.host.items()
    ]
    once = [f"{name} {_size(part)} once" for memory in stage.memory.values() for name, part in memory.host_once.items()]
    fits = f" of {_size(available)}: {verdict(size, available)}" if available else ""
    return f"  CPU memory of a node {_size(size)}{fits} [dim]({', '.join(listed + once)})[/]"


def verdict(peak: int, available: int) -> str:
    """Returns a word for whether `peak` bytes fit into `available`."""
    return "[bold red]does not fit[/]" if peak > available else "[green]fits[/]"


def _summary(plan: Plan) -> Table:
    table = Table("stage", "steps", "per step", "total", "dollars", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    hourly = plan.job.num_ranks * plan.setting.hardware.dollars_per_hour
    for stage in plan.stages:
        dollars = f"{stage.seconds / 3600 * hourly:,.0f}"
        table.add_row(stage.name, f"{stage.num_steps:,}", _time(stage.seconds_per_step), _time(stage.seconds), dollars)
    total = sum(stage.seconds for stage in plan.stages)
    table.add_row("total", "", "", _time(total), f"{plan.dollars:,.0f}")
    return table


def _how(plan: Plan) -> str:
    chosen, share = plan.setting.hardware, plan.setting.share_of_peak
    rate = "measured just now" if not chosen.is_gpu else "dense bf16 peak"
    links = (
        ""
        if not chosen.is_gpu
        else (
            f" A GPU sends {_rate(chosen.link_bytes_per_second / 1e9)} GB/s in its node and"
            f" {_rate(chosen.network_bytes_per_second * 8 / 1e9)} Gbit/s to others (--network), at {LINK_SHARE:.0%}."
        )
    )
    return (
        f"Times and costs are estimates: products run at {share:.0%} of {_rate(chosen.flops / 1e12)} TFLOP/s ({rate},"
        f" --share), and memory is read at {BANDWIDTH_SHARE if chosen.is_gpu else share:.0%} of"
        f" {_rate(chosen.bytes_per_second / 1e9)} GB/s.{links} ${chosen.dollars_per_hour:.2f} per hour and rank"
        " (--price). Loading, evaluation, checkpoints, moving what is offloaded and the overhead of each step, which"
        " dominates in steps of less than a second, are not counted."
    )


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _size(size: int) -> str:
    unit = "GiB" if size >= GIB else "MiB"
    return f"{_in(unit, size)} {unit}"


def _in(unit: str, size: int) -> str:
    return f"{size / GIB:,.2f}" if unit == "GiB" else f"{size / MIB:,.1f}"


def _time(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    if 0 < seconds < 0.001:
        return "< 1 ms"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
