"""`heed plan`: estimates a job without running it, and finds changes that make it fit.

The estimates are per stage: batches, memory per rank, time, cost, nodes. The changes are those that cost the least
time. Each is tried by planning the job with it. `show_plan` prints both as tables.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.group import WorkerGroup
from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from heed.jobs.models import known_shape
from heed.jobs.registry import WORLD
from lm.config import ModelConfig
from lm.hub import is_on_this_machine, shape_and_tokenizer
from preferences.store import LabelStore
from stages.planner import Planner, StagePlan
from stages.planning.hardware import GIB, GPUS, Hardware, hardware
from stages.planning.memory import Layout, Memory
from stages.planning.times import BANDWIDTH_SHARE, LINK_SHARE, Times
from stages.run import StageRun
from stages.sizes import Measures, Sizes, SourceSize
from training.config import BatchConfig

COMFORTABLE = 0.95  # of a GPU's memory: what the allocator's fragments may leave
RUNS = Path("runs")  # where `heed run` puts runs by default
MOST_WORKERS = 1024
MODES = ("fast", "balanced", "small")  # of ppo.memory, the fastest first
MIB = 2**20


@dataclass(frozen=True)
class Setting:
    """The hardware, the share of its peak FLOP rate that products reach, and how many rows to assume for a source that
    cannot be counted here. `node_bytes` is the CPU memory of a node with `gpus_per_node` GPUs; 0 = unknown.
    """

    hardware: Hardware
    share_of_peak: float
    assumed_rows: int
    gpus_per_node: int = 8
    node_bytes: int = 0
    measures: Measures = field(default_factory=Measures, compare=False)  # of the data; plans of one job share them


@dataclass(frozen=True)
class Plan:
    job: JobConfig
    setting: Setting
    layout: Layout
    stages: tuple[StagePlan, ...]

    @property
    def dollars(self) -> float:
        hours = sum(stage.seconds for stage in self.stages) / 3600
        return hours * self.job.num_ranks * self.setting.hardware.dollars_per_hour

    @property
    def fits(self) -> bool:
        """Whether every stage has enough memory."""
        return self.excess == 0

    @property
    def excess(self) -> int:
        """The sum over stages of the bytes by which each exceeds the memory of a rank or node."""
        over = [stage.peak - self.setting.hardware.memory_bytes for stage in self.stages]
        if self.setting.node_bytes:
            over += [self.node_bytes(stage) - self.setting.node_bytes for stage in self.stages]
        return sum(max(0, size) for size in over)

    def node_bytes(self, stage: StagePlan) -> int:
        """Returns the CPU memory that a stage takes on a node with GPUs, for the kind of rank that takes most."""
        ranks = min(self.setting.gpus_per_node, self.layout.ranks)
        return max(memory.host_bytes(ranks) for memory in stage.memory.values())


def make_plan(job: JobConfig, setting: Setting) -> Plan:
    """Plans every stage of a job. Raises: ValueError for a job without a shape, and for malformed data files."""
    model = job.model or _only_shape(job)
    if model is None:
        raise ValueError("model: missing; the plan needs the shape of the policy")
    precision = job.engine.precision
    if precision == "auto":
        precision = "bf16" if setting.hardware.is_gpu else job.engine.resolved_precision()
    layout = Layout(
        job.workers,
        job.engine.zero_stage,
        precision == "bf16",
        setting.hardware.is_gpu,
        job.engine.offload,
        job.engine.checkpoint_activations,
        ranks_per_node=min(setting.gpus_per_node, job.workers),
        node_weights_limit=job.engine.node_weights_limit(setting.hardware.memory_bytes),
        sequence_ranks=job.engine.sequence_parallel_size,
    )
    sizes = Sizes(
        model.max_position_embeddings,
        setting.assumed_rows,
        longest=_longest_conversation(job),
        measures=setting.measures,
        world_rows=lambda source: _world_rows(job, source),
        stage_size=lambda source: _stage_size(job, source, sizes),
    )
    plans, models = [], _models(job)
    for stage in job.stages:
        # Of a run, a plan reads only the data and, if an earlier run has made one, the vocabulary.
        has_models = all(map(is_on_this_machine, models[stage.name]))
        run = _PlannedRun(stage.name, job, RUNS / job.name, _NoWorkers(), None, LabelStore) if has_models else None
        shape = job.shape_before(stage) or model
        times = Times(shape, layout, setting.hardware, setting.share_of_peak)
        planner = Planner(stage.name, job, shape, layout, sizes, times, known_shape, run)
        plans.append(stage.plan(planner, job.section_of(stage)))
    return Plan(job, setting, layout, tuple(plans))


def _only_shape(job: JobConfig) -> ModelConfig | None:
    """Returns the shape of a reward model in a job without a policy, downloading it if only the hub knows it.

    Raises: ValueError naming the field if the hub does not have it.
    """
    first = job.stages[0]
    start = getattr(job.section_of(first), "init_from", "")
    try:
        return (known_shape(start) or known_shape(str(shape_and_tokenizer(start)))) if start else None
    except ValueError as error:
        raise ValueError(f"{first.name}.init_from: {error}") from None


def _models(job: JobConfig) -> dict[str, set[str]]:
    """Returns, for each stage, the models named in its section and in those of the stages that it reads."""
    found = dict[str, set[str]]()
    for stage in job.stages:  # parents first
        named = {name for _, name in stage.models_in(job.section_of(stage))}
        found[stage.name] = named.union(*(found.get(parent, ()) for parent in job.parents(stage.name)))
    return found


class _PlannedRun(StageRun):
    """A run that reads only the shape and the vocabulary of a model."""

    def start(self, parent: str) -> Path:
        named = self.job.substitute(self.name, self.own(parent))
        return shape_and_tokenizer(named) if named else self.model_of(parent)


class _NoWorkers:
    """Stands in for a run's workers: a plan needs no workers and no hardware."""

    def __call__(self) -> WorkerGroup:
        raise AssertionError("a plan starts no workers")

    def extra_group(self, name: str, size: int, python: str = "", *, on_workers: bool = False) -> WorkerGroup:
        raise AssertionError(f"a plan starts no {name}: {size}, {python}, {on_workers}")


def _longest_conversation(job: JobConfig) -> int:
    """Returns the most tokens of a conversation that the job trains on; 0 if no stage bounds it."""
    bounds = [stage.conversation_tokens(job.section_of(stage)) for stage in job.stages if stage.conversation_tokens]
    return bounds[-1] if bounds else 0


def _world_rows(job: JobConfig, source: str) -> int | None:
    """Returns the number of rows of a source "world:NAME", if the world's section states it. One number may be that of
    several files, whose names begin alike.
    """
    kind, _, name = source.partition(":")
    several = () if name.endswith("_heldout") else (f"num_{name.partition('_')[0]}",)
    fields = (f"num_{name}", f"max_{name}", *several) if kind == WORLD else ()
    num_rows = next((getattr(job.world, field) for field in fields if hasattr(job.world, field)), None)
    return None if num_rows is None else int(num_rows)


def _stage_size(job: JobConfig, source: str, sizes: Sizes) -> SourceSize | None:
    """Returns the size of what a stage of the job will write for a source "STAGE:NAME"."""
    name, _, key = source.partition(":")
    if name not in job.stage_names or key not in job.stage(name).sources:
        return None
    stage = job.stage(name)
    return stage.sources[key].size(job.section_of(stage), sizes)


def places(num_nodes: int, gpus_per_node: int, num_ranks: int) -> int:
    """Returns the number of nodes that are needed if each rank takes one GPU.

    `num_nodes` is how many there are; 0 means as many as needed. Raises: ValueError if there are too few.
    """
    needed = math.ceil(num_ranks / gpus_per_node)
    if num_nodes and needed > num_nodes:
        raise ValueError(
            f"the job has {num_ranks} ranks with one GPU each, but {num_nodes} nodes with {gpus_per_node} GPUs each"
            f" have only {num_nodes * gpus_per_node}; {needed} nodes are needed"
        )
    return needed


def advice(path: Path | None, overrides: Sequence[str], plan: Plan) -> list[str]:
    """Returns lines for the user: what makes the job fit, or if it fits, which mode of `ppo.memory` suits it."""
    if plan.fits:
        return _mode_line(path, overrides, plan)
    lines = list[str]()
    fitting_change = changes_that_fit(path, overrides, plan)
    if fitting_change is not None:
        options = " ".join(f"--set {escape(shlex.quote(change))}" for change in fitting_change[0])
        lines.append(f"[bold]fits with[/] {options}: {_peaks(fitting_change[1])}")
    larger = next((name for name in _larger(plan) if not _on(plan, name).excess), "")
    if larger:
        lines.append(f"[bold]fits as it is[/] on {larger} (--gpu {larger})")
    lines = lines or ["no setting makes it fit; use a smaller model or more workers"]
    if not plan.setting.hardware.is_gpu:
        lines.append("this is a plan for this machine's CPU; `--gpu h100` plans for GPUs")
    return lines


def _mode_line(path: Path | None, overrides: Sequence[str], plan: Plan) -> list[str]:
    """Names the fastest mode of `ppo.memory` that fits a GPU with room. A CPU has no other memory to move things to."""
    chosen = _mode(plan.job)
    if not chosen or not plan.setting.hardware.is_gpu:
        return []
    available = plan.setting.hardware.memory_bytes
    for mode in MODES:
        tried = plan if mode == chosen else _replanned(path, [*overrides, f"ppo.memory={mode}"], plan)
        if tried is None or tried.excess:
            continue
        peak = next(stage.peak for stage in tried.stages if stage.name == "ppo")
        if peak <= COMFORTABLE * available:
            what = f"{mode}, as set," if mode == chosen else f"{mode} (--set ppo.memory={mode})"
            room = f"ppo {math.ceil(10 * peak / GIB) / 10:.1f} of {available / GIB:.0f} GiB"
            return [f"[bold]ppo.memory[/]: {what} is the fastest mode that fits with room to spare: {room}"]
    return []


def _mode(job: JobConfig) -> str:
    """`ppo.memory`; "" without PPO."""
    return str(getattr(job.section_of(job.stage("ppo")), "memory", "")) if "ppo" in job.stage_names else ""


def _team_size(job: JobConfig) -> int:
    """`ppo.sampler.tensor_parallel_size`, of a job with PPO."""
    return int(job.section_of(job.stage("ppo")).sampler.tensor_parallel_size)


def changes_that_fit(path: Path | None, overrides: Sequence[str], plan: Plan) -> tuple[list[str], Plan] | None:
    """Returns the fewest of the cheapest changes that make the job fit, as `--set` takes them, and the plan with them;
    None if no changes do.

    Changes are tried cheapest first, and each that helps is kept. Then those that turn out unnecessary are dropped.
    """
    kept: list[str] = []
    best = plan
    while best.excess:
        better = next(_improvements(path, overrides, kept, best), None)
        if better is None:
            return None
        kept, best = better
    for change in list(kept):
        fewer = [other for other in kept if other != change]
        tried = _replanned(path, [*overrides, *fewer], plan)
        if tried is not None and not tried.excess:
            kept, best = fewer, tried
    return kept, best


def _improvements(
    path: Path | None, overrides: Sequence[str], kept: list[str], best: Plan
) -> Iterator[tuple[list[str], Plan]]:
    """Yields the kept changes plus one more that reduces the excess of memory, for each such change, and the plan."""
    for change in _changes(best):
        key = change.partition("=")[0]
        changed = [*(other for other in kept if other.partition("=")[0] != key), change]
        tried = _replanned(path, [*overrides, *changed], best)
        if tried is not None and tried.excess < best.excess:
            yield changed, tried


def _changes(plan: Plan) -> Iterator[str]:
    """Yields changes, from the one that costs the least time to the one that costs the most."""
    job, engine = plan.job, plan.job.engine
    available = plan.setting.hardware.memory_bytes
    for stage in plan.stages:
        if stage.peak > available:
            yield from _smaller_micro_batch(job, stage.name)
    mode = _mode(job)
    if mode == "fast":
        yield "ppo.memory=balanced"
    if engine.zero_stage == 3 and engine.node_weights and plan.layout.ranks_per_node < job.workers:
        yield "engine.node_weights=false"
    if mode:
        yield f"ppo.sampler.tensor_parallel_size={2 * _team_size(job)}"
    if not engine.checkpoint_activations:
        yield "engine.checkpoint_activations=true"
    if job.workers > 1 and engine.zero_stage < 3:
        yield f"engine.zero_stage={engine.zero_stage + 1}"
    if mode == "balanced":
        yield "ppo.memory=small"
    if engine.zero_stage and "optimizer" not in engine.offload:
        yield 'engine.offload=["optimizer"]'
    if engine.zero_stage == 3 and "parameters" not in engine.offload:
        yield 'engine.offload=["optimizer", "parameters"]'
    if job.workers % (2 * engine.sequence_parallel_size) == 0:
        yield f"engine.sequence_parallel_size={2 * engine.sequence_parallel_size}"
    if job.workers < MOST_WORKERS:
        yield f"workers={2 * job.workers}"


def _smaller_micro_batch(job: JobConfig, name: str) -> Iterator[str]:
    section = job.section_of(job.stage(name))
    for place in ("batch", "minibatch"):
        batch = getattr(section, place, None)
        for key, size in batch.given_size.items() if isinstance(batch, BatchConfig) else ():
            if size > 1:
                yield f"{name}.{place}.{key}={size // 2}"


def _replanned(path: Path | None, overrides: Sequence[str], plan: Plan) -> Plan | None:
    """Returns the plan with these overrides; None if the job does not allow them."""
    try:
        return make_plan(load_job(path, overrides, opens_models=False), plan.setting)
    except ValueError:
        return None


def _larger(plan: Plan) -> list[str]:
    """Names GPUs with more memory, the smallest and cheapest first."""
    chosen = plan.setting.hardware
    larger = [gpu for gpu in GPUS.values() if chosen.is_gpu and gpu.memory_bytes > chosen.memory_bytes]
    return [gpu.name for gpu in sorted(larger, key=lambda gpu: (gpu.memory_bytes, gpu.dollars_per_hour))]


def _on(plan: Plan, name: str) -> Plan:
    return make_plan(plan.job, replace(plan.setting, hardware=GPUS[name]))


def _peaks(plan: Plan) -> str:
    """Formats the peak of each stage."""
    return ", ".join(f"{stage.name} {stage.peak / GIB:.1f} GiB" for stage in plan.stages)


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
    """Returns what is held throughout, and what the phase that needs most adds."""
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
    """Returns whether `peak` bytes fit into `available`, in words."""
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
