"""`heed plan`: estimates a job without running it, and finds changes that make it fit.

Each stage describes its work (`stages.plan`). Here that becomes batches, memory per rank (`heed.jobs.memory`), time
(`heed.jobs.times`) and cost. Batches are exact, memory is an upper bound, and times are rough. No model is allocated.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.group import WorkerGroup
from heed.jobs import memory as per_rank
from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from heed.jobs.memory import Layout, Memory, PPOModels, PPOWork, count, forward_pass
from heed.jobs.models import known_shape
from heed.jobs.registry import WORLD
from heed.jobs.times import GIB, GPUS, Hardware, Times, assumptions, hardware
from heed.jobs.waiting import Speeds, Waiting, simulate
from lm.config import ModelConfig
from lm.hub import is_on_this_machine, shape_and_tokenizer
from lm.samplers.vllm_engine import GPU_MEMORY_SHARE, GPU_MEMORY_SHARE_OF_GUEST
from lm.sequence_parallel import check_sequence_split
from lm.transfer import MAX_TOKENS
from ppo.plan import PPOIteration
from preferences.store import LabelStore
from reward.sampling import BATCH
from stages.data import PROMPTS_AT_ONCE
from stages.plan import Planner, Sampling, Training, Work
from stages.reports.text import count_of
from stages.run import StageRun
from stages.sizes import Measures, ResponseTokens, Sizes, SourceSize
from training.config import BatchConfig, FineTuningConfig

RANK = "rank"  # the kind of every rank, if all are alike
RUNS = Path("runs")  # where `heed run` puts runs by default
MOST_WORKERS = 1024


@dataclass(frozen=True)
class StagePlan:
    """The estimate for one stage. `batch` maps names to numbers. A step is one optimizer step, one PPO iteration, or
    the whole of a stage that only samples. `memory` is per rank, by kind of rank. `once_seconds` are spent in addition
    to the steps, before or after all of them.
    """

    unit: str
    batch: Mapping[str, int]
    memory: Mapping[str, Memory]
    num_steps: int
    seconds_per_step: float
    once_seconds: float = 0.0
    name: str = ""
    assumptions: tuple[str, ...] = ()
    waiting: Waiting | None = None  # of ranks for each other, if it was simulated

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs the most memory."""
        return max(memory.peak for memory in self.memory.values())

    @property
    def seconds(self) -> float:
        return self.num_steps * self.seconds_per_step + self.once_seconds


def estimate(work: Work | None, times: Times) -> StagePlan:
    """Returns a stage's plan without its name and assumptions. A GPU also holds what its libraries take."""
    match work:
        case Training():
            plan = _training(work, times)
        case Sampling():
            plan = _sampling(work, times)
        case PPOIteration():
            plan = _ppo(work, times)
        case _:
            return StagePlan("–", {"ranks": times.layout.ranks}, {RANK: Memory({}, {"unknown": {}})}, 0, 0.0)
    if not times.layout.is_gpu:
        return plan
    reserved = {"CUDA, NCCL, cuBLAS": per_rank.RESERVED_BYTES}
    return replace(plan, memory={k: replace(of, held={**of.held, **reserved}) for k, of in plan.memory.items()})


def _training(work: Training, times: Times) -> StagePlan:
    """Plans the training of one model, with what is sampled before it."""
    config, layout, model, lengths, per_unit = work.config, times.layout, work.model, work.lengths, work.rows_per_unit
    check_sequence_split(model, layout.sequence_ranks)
    width = layout.packed_width(lengths.longest) if config.packs_sequences else lengths.longest
    rows, micro_batches = per_rank.rows_and_passes(config.batch, layout.shares, width, per_unit)
    # Only responses have logits. A pass may be full of rows with the largest share of response tokens.
    head_share = lengths.response_share if work.has_logits else 0.0
    num_logits = math.ceil(rows * width * head_share) * model.vocab_size
    lora = config.lora if isinstance(config, FineTuningConfig) else None
    counts = count(model, config.optimizer, num_scores=work.num_scores, lora=lora)
    of = forward_pass(layout, rows, width, dropout=config.dropout, is_trained=True)
    memory = per_rank.training_memory(counts, layout, of, num_logits, micro_batches)
    if work.num_scores:  # the trained model scores the held-out comparisons
        most = max(per_rank.scoring_rows(config.batch, width, per_unit), MAX_TOKENS // width)
        held_out = per_rank.scoring_phase(counts, layout, forward_pass(layout, most, width, is_trained=True))
        memory = replace(memory, phases={**memory.phases, "score held-out": held_out})
    mean = round(lengths.mean) or lengths.longest
    tokens = config.batch.batch_size * per_unit * mean
    numbers = {
        "batch_size": config.batch.batch_size,
        **config.batch.given_size,
        "ranks": layout.ranks,
        "micro-batches per rank and step": micro_batches,
        "steps": work.num_steps,
        "tokens per step": tokens,
        **({"responses per comparison": per_unit} if per_unit > 1 else {}),
    }
    step = times.step(counts, tokens / layout.ranks, of.num_tokens, mean, head_share)
    step, once = (
        so_far + (times.forward(model, read / layout.ranks, mean, head_share) if read else 0.0)
        for so_far, read in ((step, work.read_tokens), (0.0, work.read_first))
    )
    plan = StagePlan(work.unit, numbers, {RANK: memory}, work.num_steps, step, once)
    if work.samples is None:
        return plan
    sampled = _sampling(work.samples, times)
    return replace(
        plan,
        batch={**numbers, **{name: sampled.batch[name] for name in ("prompts", "responses per prompt")}},
        memory={"rank that samples": sampled.memory[RANK], "rank that trains": memory},
        seconds_per_step=step + sampled.seconds / work.num_steps,
    )


def _sampling(work: Sampling, times: Times) -> StagePlan:
    """Plans a stage that samples on all workers, and reads the samples with other models."""
    layout, model, seq_len, new = times.layout, work.model, work.lengths.longest, work.response_tokens
    counts, c = count(model), layout.compute_bytes
    # Reward models of such a stage are bf16 on a GPU, otherwise fp32 (`lm.source`). A worker keeps these models.
    widths = {"reference": c, "reward model": 2 if layout.is_gpu else 4}
    held = {"weights": c * counts.total} | {name: widths[name] * counts.total for name in work.measured_by}
    free = times.hardware.memory_bytes - per_rank.RESERVED_BYTES - sum(held.values())
    rows = per_rank.rows_at_once(model, layout, free, min(BATCH, PROMPTS_AT_ONCE * work.at_once), seq_len)
    phases = {"generate": per_rank.sampling_phase(model, layout, counts.total, rows, seq_len - new, new)}
    if work.measured_by:
        phases["measure"] = per_rank.measuring_phase(model, layout, seq_len, new)
    num_responses = math.ceil(work.num_prompts * work.responses_per_prompt / layout.ranks)
    seconds = times.sampling(counts, num_responses, rows, round(work.lengths.mean), new)
    numbers = {"prompts": work.num_prompts, "responses per prompt": work.responses_per_prompt, "ranks": layout.ranks}
    return StagePlan("responses", numbers, {RANK: Memory(held, phases)}, 1, seconds)


def _ppo(work: PPOIteration, times: Times) -> StagePlan:
    """Plans an iteration: sampling, the passes before the updates, and the updates."""
    config, layout, batch, mean = work.config, times.layout, work.config.minibatch, round(work.lengths.mean)
    models = _ppo_models(work)
    for trained in (models.policy, models.value or models.policy):
        check_sequence_split(trained.config, layout.sequence_ranks)
    rank = _ppo_work(work, times)
    numbers = {
        "rollout_batch_size": config.rollout_batch_size,
        "batch_size": batch.batch_size,
        **batch.given_size,
        "ranks": layout.ranks,
        "micro-batches per rank and update": rank.num_micro_batches,
        "updates per iteration": config.updates_per_iteration,
        "updates": config.num_iterations * config.updates_per_iteration,
        "responses": config.num_iterations * config.rollout_batch_size,
        "tokens per iteration": config.rollout_batch_size * mean,
    }
    learning = _learning_seconds(work, models, rank, times)
    if config.placement.roles_share_ranks:
        memory = {RANK: per_rank.ppo_memory(models, layout, rank)}
    else:
        if layout.is_gpu:
            learning += layout.compute_bytes * models.policy.total / times.hardware.network_bytes_per_second
        roles = {"learner": per_rank.learner, "generator": per_rank.generator, "scorer": per_rank.scorer}
        memory = {name: role(models, layout, rank) for name, role in roles.items()}
    at_once = max(needed.sampled_at_once for needed in memory.values())
    if len(work.responses.weights) > 1 or config.placement.samples_rounds:
        waiting = simulate(work, Speeds.of(work, models.policy, times, at_once, learning))
        return StagePlan("responses", numbers, memory, config.num_iterations, waiting.seconds, waiting=waiting)
    new = round(work.responses.mean)
    sampling = times.sampling(models.policy, rank.rollout_rows, at_once, mean, new, rank.team_size)
    seconds = max(learning, sampling) if config.placement.max_staleness else learning + sampling
    return StagePlan("responses", numbers, memory, config.num_iterations, seconds)


def _ppo_models(work: PPOIteration) -> PPOModels:
    config, value = work.config, work.config.value_optimizer
    num_objectives = max(1, len(config.reward.objective_weights))
    return PPOModels(
        count(work.policy, config.policy_optimizer, lora=config.lora),
        None if value is None else count(work.critic, value, num_scores=1, lora=work.shared_adapter or config.lora),
        None if config.external_reward else count(work.critic, num_scores=num_objectives, lora=work.shared_adapter),
        tuple(map(count, work.teachers)),
        tuple(map(count, work.judges)),
    )


def _ppo_work(work: PPOIteration, times: Times) -> PPOWork:
    """Returns the work of each rank. Every micro-batch of responses also has its share of the pretraining rows.

    A pass has as many tokens as `micro_batch_size` of the longest prompts with responses. If prompts are shorter,
    it holds more responses, and so more logits.
    """
    config, layout, lengths, seq_len = work.config, times.layout, work.lengths, work.lengths.longest
    # A reward model reads a truncated response with an end token added.
    width, scored_width = (layout.packed_width(tokens) for tokens in (seq_len, seq_len + 1))
    rows, micro_batches = per_rank.rows_and_passes(config.minibatch, layout.shares, width)
    responses = min(config.minibatch.batch_size // layout.shares, rows * seq_len // lengths.shortest)
    ptx = math.ceil(config.ptx_rows / layout.shares / micro_batches)
    scored_rows = per_rank.scoring_rows(config.minibatch, scored_width)
    vllm_share = GPU_MEMORY_SHARE_OF_GUEST if config.placement.roles_share_ranks else GPU_MEMORY_SHARE
    return PPOWork(
        forward_pass(layout, rows + ptx, max(width, work.ptx_tokens), is_trained=True),
        forward_pass(layout, scored_rows, scored_width, is_trained=True),
        (max(rows, responses) * config.max_new_tokens + ptx * work.ptx_tokens) * work.policy.vocab_size,
        math.ceil(config.rows_in_progress / (config.placement.num_generators or layout.ranks)),
        (work.policy.max_position_embeddings if config.lengthens_prompts else seq_len) - config.max_new_tokens,
        config.max_new_tokens,
        micro_batches,
        config.memory,
        team_size=config.sampler.tensor_parallel_size,
        has_average=config.ema.decay > 0,
        shares_body=config.shared_body,
        gpu_bytes=times.hardware.memory_bytes * layout.is_gpu,
        engine_share=vllm_share if layout.is_gpu and config.sampler.has_own_process else 0.0,
        max_rows=config.sampler.max_rows,
        sends_apart=not config.placement.roles_share_ranks,
    )


def _learning_seconds(work: PPOIteration, models: PPOModels, rank: PPOWork, times: Times) -> float:
    """Returns the seconds of an iteration without sampling: a pass of policy, reference, and teachers, judges, value
    function and reward model if there are any; then the updates of policy and value function with the pretraining rows.
    Heads read only the responses.
    """
    config, seq_len, ranks = work.config, round(work.lengths.mean), times.layout.ranks
    tokens, head_share = config.rollout_batch_size * seq_len / ranks, work.responses.mean / seq_len
    passes = [(model, tokens, head_share) for model in (models.policy, models.policy, *models.teachers)]
    graded = config.advantage.oversample * tokens
    passes += [(models.reward, graded, 0.0)] if models.reward else []
    passes += [
        (model, graded * judge.num_questions, 0.0)
        for model, judge in zip(models.judges, config.local_judges, strict=True)
    ]
    pass_tokens, step_tokens = rank.trained.num_tokens, tokens / config.num_minibatches
    update = times.step(models.policy, step_tokens, pass_tokens, seq_len, head_share)
    if models.value is not None:
        passes.append((models.value, tokens, 0.0))
        update += times.step(models.value, step_tokens, pass_tokens, seq_len, 0.0)
    if work.ptx_tokens:
        ptx = config.ptx_rows * work.ptx_tokens / ranks, work.ptx_tokens, 1.0
        update += times.forward(work.policy, *ptx) + times.backward(models.policy, *ptx)
    read = sum(times.forward(model.config, number, seq_len, share) for model, number, share in passes)
    return read + config.updates_per_iteration * update


# --- jobs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The hardware, the share of its peak FLOP rate that products reach, and how many rows to assume for a source that
    cannot be counted here.
    """

    hardware: Hardware
    share_of_peak: float
    assumed_rows: int
    gpus_per_node: int = 8
    response_tokens: ResponseTokens | None = None  # of PPO; None = as many as may be
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
        """The sum over stages of the bytes by which each exceeds the memory of a rank."""
        return sum(max(0, stage.peak - self.setting.hardware.memory_bytes) for stage in self.stages)

    def node_bytes(self, stage: StagePlan) -> int:
        """Returns the CPU memory that a stage takes on a node with GPUs, for the kind of rank that takes most."""
        ranks = min(self.setting.gpus_per_node, self.layout.ranks)
        return max(memory.host_bytes(ranks) for memory in stage.memory.values())


def make_plan(job: JobConfig, setting: Setting) -> Plan:
    """Plans every stage of a job. Raises: ValueError for a job without a shape, and for malformed data files."""
    model = job.model or _only_shape(job)
    if model is None:
        raise ValueError("model: missing; the plan needs the shape of the policy")
    engine = job.engine.on_ranks(job.workers)
    precision = engine.precision
    if precision == "auto":
        precision = "bf16" if setting.hardware.is_gpu else job.engine.resolved_precision()
    layout = Layout(
        job.workers, engine.zero_stage, precision == "bf16", setting.hardware.is_gpu, engine.offload,
        engine.checkpoint_activations,
        ranks_per_node=min(setting.gpus_per_node, job.workers),
        node_weights_limit=engine.node_weights_limit(setting.hardware.memory_bytes),
        sequence_ranks=engine.sequence_parallel_size, records=engine.record_micro_batches,
    )  # fmt: skip
    sizes = Sizes(
        model.max_position_embeddings,
        setting.assumed_rows,
        longest=_longest_conversation(job),
        response_tokens=setting.response_tokens,
        measures=setting.measures,
        world_rows=lambda source: _world_rows(job, source),
        stage_size=lambda source: _stage_size(job, source, sizes),
    )
    times = Times(layout, setting.hardware, setting.share_of_peak)
    plans, models = [], _models(job)
    for stage in job.stages:
        # Of a run, a plan reads only the data and, if an earlier run has made one, the vocabulary.
        has_models = all(map(is_on_this_machine, models[stage.name]))
        run = _PlannedRun(stage.name, job, RUNS / job.name, _NoWorkers(), None, LabelStore) if has_models else None
        shape = job.shape_before(stage) or model
        planner, work = Planner(stage.name, job, shape, sizes, known_shape, run), None
        if stage.plan is None:
            sizes.assume("this stage gives no estimate; its memory and time are not counted")
        else:
            work = stage.plan(planner, job.section_of(stage))
        plans.append(replace(estimate(work, times), name=stage.name, assumptions=sizes.taken()))
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


# --- what to change --------------------------------------------------------------------------------------------------


def advice(path: Path | None, overrides: Sequence[str], plan: Plan) -> list[str]:
    """Returns lines for the user: what makes the job fit."""
    if plan.fits:
        return []
    lines = list[str]()
    fitting_change = changes_that_fit(path, overrides, plan)
    if fitting_change is not None:
        options = " ".join(f"--set {escape(shlex.quote(change))}" for change in fitting_change[0])
        peaks = ", ".join(f"{stage.name} {stage.peak / GIB:.1f} GiB" for stage in fitting_change[1].stages)
        lines.append(f"[bold]fits with[/] {options}: {peaks}")
    larger = [gpu for gpu in GPUS.values() if gpu.memory_bytes > plan.setting.hardware.memory_bytes]
    for gpu in sorted(larger, key=lambda gpu: (gpu.memory_bytes, gpu.dollars_per_hour)):
        if plan.setting.hardware.is_gpu and make_plan(plan.job, replace(plan.setting, hardware=gpu)).fits:
            lines.append(f"[bold]fits as it is[/] on {gpu.name} (--gpu {gpu.name})")
            break
    lines = lines or ["no setting makes it fit; use a smaller model or more workers"]
    if not plan.setting.hardware.is_gpu:
        lines.append("this is a plan for this machine's CPU; `--gpu h100` plans for GPUs")
    return lines


def changes_that_fit(path: Path | None, overrides: Sequence[str], plan: Plan) -> tuple[list[str], Plan] | None:
    """Returns the fewest of the cheapest changes that make the job fit, as `--set` takes them, and the plan with them;
    None if no changes do.

    Changes are tried cheapest first, and each that helps is kept. Then those that turn out unnecessary are dropped.
    """
    kept, best = list[str](), plan
    while best.excess:
        for change in _changes(best):
            changed = [*(other for other in kept if not other.startswith(change.partition("=")[0] + "=")), change]
            tried = _replanned(path, [*overrides, *changed], best)
            if tried is not None and tried.excess < best.excess:
                kept, best = changed, tried
                break
        else:
            return None
    for change in list(kept):
        fewer = [other for other in kept if other != change]
        tried = _replanned(path, [*overrides, *fewer], plan)
        if tried is not None and tried.fits:
            kept, best = fewer, tried
    return kept, best


def _changes(plan: Plan) -> Iterator[str]:
    """Yields changes, from the one that costs the least time to the one that costs the most."""
    job, engine = plan.job, plan.job.engine
    for stage in plan.stages:
        if stage.peak > plan.setting.hardware.memory_bytes:
            yield from _smaller_micro_batch(job, stage.name)
    ppo = job.section_of(job.stage("ppo")) if "ppo" in job.stage_names else None
    if ppo and ppo.memory == "fast":
        yield "ppo.memory=balanced"
    if engine.zero_stage == 3 and engine.node_weights and plan.layout.ranks_per_node < job.workers:
        yield "engine.node_weights=false"
    if ppo:
        yield f"ppo.sampler.tensor_parallel_size={2 * ppo.sampler.tensor_parallel_size}"
    if not engine.checkpoint_activations:
        yield "engine.checkpoint_activations=true"
    if job.workers > 1 and engine.zero_stage < 3:
        yield f"engine.zero_stage={engine.zero_stage + 1}"
    if ppo and ppo.memory == "balanced":
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


# --- the command -----------------------------------------------------------------------------------------------------


def show_plan(
    out: Console,
    path: Path | None,
    overrides: Sequence[str],
    *,
    gpu: str,
    gpus_per_node: int,
    price: float | None,
    network_gbit: float | None,
    share_of_peak: float | None,
    assumed_rows: int,
    response_tokens: str,
) -> bool:
    """Print a job file's plan, verdict first, and changes that make it fit if it does not. Returns whether it fits.
    None stands for the hardware's own value.

    Raises: ValueError for an invalid job, GPU or `response_tokens`.
    """
    job = load_job(path, overrides, opens_models=False)
    chosen = hardware(gpu, job.workers, job.engine.resolved_precision())
    if price is not None:
        chosen = replace(chosen, dollars_per_hour=price)
    if network_gbit is not None:
        chosen = replace(chosen, network_bytes_per_second=network_gbit * 1e9 / 8)
    responses = ResponseTokens.parse(response_tokens) if response_tokens else None
    plan = make_plan(job, Setting(chosen, share_of_peak or chosen.usual_share, assumed_rows, gpus_per_node, responses))
    largest = max(plan.stages, key=lambda stage: stage.peak)
    nodes, layout = math.ceil(job.num_ranks / gpus_per_node), plan.layout
    machines = f"{count_of(nodes, 'node')} x {min(gpus_per_node, layout.ranks)} {gpu}"
    where, machines = (gpu, machines) if chosen.is_gpu else ("this machine's CPU",) * 2
    out.print(
        f"{job.name}: {'[green]fits' if plan.fits else '[bold red]does not fit'}[/] on {where}: {largest.name} needs"
        f" most, {_size(largest.peak)} of {_size(chosen.memory_bytes)} per worker"
    )
    precision = "bf16" if layout.is_bf16 else "fp32"
    out.print(f"{count_of(layout.ranks, 'worker')} on {machines}, ZeRO {layout.zero_stage}, {precision}")
    for line in advice(path, overrides, plan):
        out.print(line)
    out.print(_summary(plan))
    for stage in plan.stages:
        out.print(f"\n[bold]{stage.name}[/], in {stage.unit}")
        out.print("  " + ", ".join(f"{name} {number:,}" for name, number in stage.batch.items()))
        for kind, memory in stage.memory.items():
            out.print(_memory_table(kind, memory))
        if size := plan.node_bytes(stage):
            out.print(f"  CPU memory of a node: {_size(size)}")
        if stage.waiting:
            out.print(f"  waiting, in shares of an iteration: {stage.waiting}")
        for assumption in stage.assumptions:
            out.print(f"  [dim]{escape(assumption)}")
    out.print(f"\n[dim]{assumptions(plan.setting.hardware, plan.setting.share_of_peak)}")
    return plan.fits


def _summary(plan: Plan) -> Table:
    table = Table("\nstage", "\nsteps", "\nper step", "\ntotal", "\ndollars", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    hourly = plan.job.num_ranks * plan.setting.hardware.dollars_per_hour
    for stage in plan.stages:
        dollars = f"{stage.seconds / 3600 * hourly:,.0f}"
        table.add_row(stage.name, f"{stage.num_steps:,}", _time(stage.seconds_per_step), _time(stage.seconds), dollars)
    table.add_row("total", "", "", _time(sum(stage.seconds for stage in plan.stages)), f"{plan.dollars:,.0f}")
    return table


def _memory_table(kind: str, memory: Memory) -> Table:
    """Returns what is held throughout, and what the phase that needs most adds."""
    table = Table(f"  memory of a {kind}", "", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    phase = memory.peak_phase
    for name, size in memory.held.items():
        table.add_row(f"  {name}", _size(size))
    for name, size in memory.phases[phase].items():
        table.add_row(f"  + {name} [dim]({phase})[/]", _size(size))
    table.add_row("  [bold]peak[/]", f"[bold]{_size(memory.peak)}[/]")
    return table


def _size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"


def _time(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
