"""`heed plan`: a job in numbers before it runs, stage by stage: batches, memory per rank, time, cost, nodes."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from cluster.group import WorkerGroup
from heed.jobs.job import JobConfig
from heed.jobs.model_shape import known_shape
from heed.jobs.registry import WORLD
from lm.config import ModelConfig
from lm.hub import is_on_this_machine, shape_and_tokenizer
from stages.planner import Planner, StagePlan
from stages.planning.hardware import Hardware, Times
from stages.planning.memory import Layout
from stages.run import StageRun
from stages.sizes import Measures, Sizes, SourceSize

# CUDA's context, NCCL's buffers and the gaps of an allocator are not counted; a tenth is what they commonly take.
COMFORTABLE = 0.9
RUNS = Path("runs")  # where `heed run` puts runs by default


@dataclass(frozen=True)
class Setting:
    """The hardware, the share of its peak that is reached, and the rows of a source that cannot be counted here.
    `node_bytes` is the CPU memory of a node of `gpus_per_node` GPUs; 0 = not known.
    """

    hardware: Hardware
    share_of_peak: float
    assumed_rows: int
    gpus_per_node: int = 8
    node_bytes: int = 0
    measures: Measures = field(default_factory=Measures, compare=False)  # of the data, for the plans of one job


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
        """Whether every stage has the memory that it needs, and Heed all that it needs."""
        return self.excess == 0 and not any(stage.missing for stage in self.stages)

    @property
    def excess(self) -> int:
        """Bytes by which stages exceed the memory of a rank or node, added up."""
        over = [stage.peak - self.setting.hardware.memory_bytes for stage in self.stages]
        if self.setting.node_bytes:
            over += [self.node_bytes(stage) - self.setting.node_bytes for stage in self.stages]
        return sum(max(0, size) for size in over)

    def node_bytes(self, stage: StagePlan) -> int:
        """CPU memory that a stage takes of a node with GPUs: of the kind of rank that takes most."""
        ranks = min(self.setting.gpus_per_node, self.layout.ranks)
        return max(memory.host_bytes(ranks) for memory in stage.memory.values())


def make_plan(job: JobConfig, setting: Setting) -> Plan:
    """Raises: ValueError for a job without a shape, and for files of its data that are malformed."""
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
    )
    sizes = Sizes(
        model.max_position_embeddings,
        setting.assumed_rows,
        longest=_longest_conversation(job),
        measures=setting.measures,
        world_rows=lambda source: _world_rows(job, source),
        stage_size=lambda source: _stage_size(job, source, sizes),
    )
    times = Times(model, layout, setting.hardware, setting.share_of_peak)
    plans = []
    for stage in job.stages:
        # Nothing of a run is there but its data; a vocabulary that an earlier run has made is read.
        has_models = all(map(is_on_this_machine, _models(job, stage.name)))
        run = _PlannedRun(stage.name, job, RUNS / job.name, _NoWorkers(), None) if has_models else None
        planner = Planner(stage.name, job, model, layout, sizes, times, known_shape, run)
        plans.append(stage.plan(planner, job.section_of(stage)))
    return Plan(job, setting, layout, tuple(plans))


def _only_shape(job: JobConfig) -> ModelConfig | None:
    """The shape of a reward model in a job without a policy."""
    starts = [getattr(job.section_of(stage), "init_from", "") for stage in job.stages]
    return known_shape(starts[0]) if starts[0] else None


def _models(job: JobConfig, stage_name: str) -> set[str]:
    """The models that the sections of a stage, and of the stages that it reads, name."""
    stage = job.stage(stage_name)
    named = {getattr(job.section_of(stage), name) for name in stage.model_fields} - {""}
    return named.union(*(_models(job, parent) for parent in job.parents(stage_name) if parent in job.stage_names))


class _PlannedRun(StageRun):
    """A run that reads of a model only its shape and vocabulary."""

    def start(self, parent: str) -> Path:
        named = self.job.substitute(self.name, self.own(parent))
        return shape_and_tokenizer(named) if named else self.model_of(parent)


class _NoWorkers:
    """In place of a run's workers, which a plan needs as little as any hardware."""

    def __call__(self) -> WorkerGroup:
        raise AssertionError("a plan starts no workers")

    def extra_group(self, name: str, size: int, python: str = "", *, on_workers: bool = False) -> WorkerGroup:
        raise AssertionError(f"a plan starts no {name}: {size}, {python}, {on_workers}")


def _longest_conversation(job: JobConfig) -> int:
    """The most tokens of a conversation that the job teaches; 0 where no stage bounds it."""
    bounds = [stage.conversation_tokens(job.section_of(stage)) for stage in job.stages if stage.conversation_tokens]
    return bounds[-1] if bounds else 0


def _world_rows(job: JobConfig, source: str) -> int | None:
    """Rows of a source "world:NAME", where the world's section names them."""
    kind, _, name = source.partition(":")
    fields = (f"num_{name}", f"max_{name}") if kind == WORLD else ()
    found = next((getattr(job.world, field) for field in fields if hasattr(job.world, field)), None)
    return None if found is None else int(found)


def _stage_size(job: JobConfig, source: str, sizes: Sizes) -> SourceSize | None:
    """What a stage of the job will write for a source "STAGE:NAME"."""
    name, _, key = source.partition(":")
    if name not in job.stage_names or key not in job.stage(name).sources:
        return None
    stage = job.stage(name)
    return stage.sources[key].size(job.section_of(stage), sizes)


def places(num_nodes: int, gpus_per_node: int, num_ranks: int) -> int:
    """Nodes that are needed where each rank takes one GPU of a node. Raises: ValueError where there are not so many;
    `num_nodes` 0 means as many as it takes.
    """
    needed = math.ceil(num_ranks / gpus_per_node)
    if num_nodes and needed > num_nodes:
        raise ValueError(
            f"the job has {num_ranks} ranks, each with one GPU; {num_nodes} nodes of {gpus_per_node} have"
            f" {num_nodes * gpus_per_node}; {needed} nodes are needed"
        )
    return needed
