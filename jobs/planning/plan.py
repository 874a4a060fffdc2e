"""`heed plan`: a job in numbers before it runs, stage by stage: batches, memory of a rank, time, cost, places.

Nothing of a model is allocated. Batches are exact; what depends on data that is not here yet is an upper bound or an
assumption, and each of those is said (jobs/planning/sizes.py). Memory is the count of jobs/planning/memory.py, time
that of jobs/planning/times.py.
"""

import math
from dataclasses import dataclass

from collect.stage import CollectConfig
from jobs.job import JobConfig
from jobs.planning.hardware import Hardware
from jobs.planning.memory import (
    GENERATION_ROWS,
    Counts,
    Layout,
    Memory,
    count,
    forward_pass,
    ppo_memory,
    sampling_phase,
    training_memory,
)
from jobs.planning.sizes import Sizes
from jobs.planning.times import Times
from jobs.run import PROMPTS_AT_ONCE
from lm.config import ModelConfig
from ppo.config import PPOConfig
from pretrain.stage import PretrainConfig
from reward.stage import RewardConfig
from sft.stage import SFTConfig
from training.config import OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class Setting:
    """The hardware, the share of its peak that is reached, and the rows of a source that cannot be counted here."""

    hardware: Hardware
    share_of_peak: float
    assumed_rows: int


@dataclass(frozen=True)
class StagePlan:
    """One stage. `batch` holds its numbers under their names; a step is an optimizer's step, or an iteration of PPO, or
    all of a stage that only samples.
    """

    name: str
    unit: str
    batch: dict[str, int]
    memory: Memory
    num_steps: int
    seconds_per_step: float
    assumptions: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.num_steps * self.seconds_per_step


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
    def fits_memory(self) -> bool:
        return all(stage.memory.peak <= self.setting.hardware.memory_bytes for stage in self.stages)


def make_plan(job: JobConfig, setting: Setting) -> Plan:
    """Errors: ValueError for a job without a shape, and for files of its data that are malformed."""
    if job.model is None:
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
    planner = _Planner(job, job.model, setting, layout)
    return Plan(job, setting, layout, tuple(getattr(planner, stage)() for stage in job.stages))


def places(num_nodes: int, gpus_per_node: int, num_ranks: int) -> int:
    """Nodes that are needed where each rank takes one GPU of a node. Errors: ValueError where there are not so many;
    `num_nodes` 0 means as many as it takes.
    """
    needed = math.ceil(num_ranks / gpus_per_node)
    if num_nodes and needed > num_nodes:
        raise ValueError(
            f"the job has {num_ranks} ranks, each with one GPU; {num_nodes} nodes of {gpus_per_node} have"
            f" {num_nodes * gpus_per_node}; {needed} nodes are needed"
        )
    return needed


class _Planner:
    """The stages of one job; each method is named as its stage."""

    def __init__(self, job: JobConfig, model: ModelConfig, setting: Setting, layout: Layout) -> None:
        self.job, self.model, self.layout = job, model, layout
        self.sizes = Sizes(job, model.max_position_embeddings, setting.assumed_rows)
        self.times = Times(model, layout, setting.hardware, setting.share_of_peak)

    # --- stages that train one model --------------------------------------------------------------------------------

    def pretrain(self) -> StagePlan:
        config = self.job.pretrain
        assert isinstance(config, PretrainConfig)
        # A decoder predicts the row's tokens but the first; to the others the start token is one of the row's.
        tokens = config.seq_len - (self.model.kind == "decoder")
        logits = config.batch.micro_batch_size * tokens * self.model.vocab_size
        return self._training("pretrain", "rows", config, config.num_steps, tokens, logits)

    def sft(self) -> StagePlan:
        config = self.job.sft
        assert isinstance(config, SFTConfig)
        rows = sum(self.sizes.num_rows(data) for data in config.demonstrations)
        tokens = config.seq_len - (self.model.kind == "decoder")
        if self.model.kind == "decoder":
            self.sizes.assume("at most: packing puts several conversations in a row, and not every token counts")
        steps = max(1, round(config.num_epochs * rows / config.batch.batch_size))
        logits = config.batch.micro_batch_size * tokens * self.model.vocab_size
        return self._training("sft", "rows", config, steps, tokens, logits)

    def reward(self) -> StagePlan:
        config = self.job.reward
        assert isinstance(config, RewardConfig)
        if config.init_from:
            self.sizes.assume(f"{config.init_from} is taken to have the policy's shape")
        tasks = self.sizes.num_tasks(config.rankings)
        responses = self.sizes.responses_per_task(config.rankings)
        steps = max(1, round(config.num_epochs * tasks * (1 - config.heldout_share) / config.batch.batch_size))
        self.sizes.assume("one ranking a task; rankings of one task are one comparison")
        tokens = self.sizes.conversation_tokens()
        return self._training(
            "reward", "comparisons", config, steps, tokens, 0, rows_per_unit=responses, num_scores=len(config.labels)
        )

    def _training(
        self,
        name: str,
        unit: str,
        config: TrainingConfig,
        num_steps: int,
        seq_len: int,
        num_logits: int,
        *,
        rows_per_unit: int = 1,
        num_scores: int = 0,
    ) -> StagePlan:
        batch, layout = config.batch, self.layout
        micro_batches = batch.num_micro_batches(layout.ranks)
        counts = count(self.model, config.optimizer, num_scores=num_scores)
        rows = batch.micro_batch_size * rows_per_unit
        of = forward_pass(self.model, layout, rows, seq_len, is_packed=name == "sft", dropout=config.dropout)
        memory = training_memory(self.model, counts, layout, of, num_logits, micro_batches)
        tokens = batch.batch_size * rows_per_unit * seq_len
        flops = tokens * self.times.forward_flops(seq_len, 0.0 if num_scores else 1.0) * self.times.passes(counts)
        numbers = {
            "batch_size": batch.batch_size,
            "micro_batch_size": batch.micro_batch_size,
            "ranks": layout.ranks,
            "micro-batches a rank and step": micro_batches,
            "steps": num_steps,
            "tokens a step": tokens,
        }
        if num_scores > 1:
            numbers["heads, one an objective"] = num_scores
        if rows_per_unit > 1:
            numbers["responses a comparison"] = rows_per_unit
        return self._stage(name, unit, numbers, memory, num_steps, self.times.compute_seconds(flops))

    # --- stages that sample -----------------------------------------------------------------------------------------

    def collect(self) -> StagePlan:
        config = self.job.collect
        assert isinstance(config, CollectConfig)
        prompts = self.sizes.num_rows(config.prompts)
        numbers = {"prompts": prompts, "responses a prompt": config.responses_per_prompt, "ranks": self.layout.ranks}
        samples = prompts * config.responses_per_prompt
        return self._sampling("collect", numbers, samples, config.responses_per_prompt, config.max_new_tokens)

    def compare(self) -> StagePlan:
        config = self.job.compare
        assert config is not None
        prompts = self.sizes.num_rows(config.prompts)
        pool = max(config.best_of, config.num_samples)
        per_prompt = pool + config.num_samples * (1 + (self.job.pretrain is not None))
        numbers = {"prompts": prompts, "responses a prompt": per_prompt, "ranks": self.layout.ranks}
        return self._sampling("compare", numbers, prompts * per_prompt, pool, config.max_new_tokens)

    def _sampling(
        self, name: str, numbers: dict[str, int], samples: int, per_prompt: int, response_tokens: int
    ) -> StagePlan:
        seq_len = self.sizes.conversation_tokens(response_tokens)
        total = count(self.model, _ANY_OPTIMIZER).total
        rows = min(GENERATION_ROWS, PROMPTS_AT_ONCE * per_prompt)
        c = self.layout.compute_bytes
        # The reference that samples are measured against; reward models of these stages stay in fp32.
        beside = {"reference": c * total, "reward model": 4 * total} if name == "compare" else {}
        phases = {"generate": sampling_phase(self.model, self.layout, total, rows, seq_len)}
        if beside:
            logits = GENERATION_ROWS * response_tokens * self.model.vocab_size
            phases["measure"] = {**beside, "logits": (c + 8) * logits}
        memory = Memory({"weights": c * total}, phases)
        per_rank = math.ceil(samples / self.layout.ranks)
        seconds = self.times.sampling_seconds(total, per_rank, seq_len, response_tokens)
        return self._stage(name, "responses", numbers, memory, 1, seconds)

    # --- PPO --------------------------------------------------------------------------------------------------------

    def ppo(self) -> StagePlan:
        config = self.job.ppo
        assert isinstance(config, PPOConfig)
        layout, batch = self.layout, config.minibatch
        if config.reward_from:
            self.sizes.assume(f"{config.reward_from} is taken to have the policy's shape")
        if config.elsewhere:
            self.sizes.assume(
                "the reward comes from elsewhere; a reward model's time and memory are counted all the same"
            )
        seq_len = self.sizes.conversation_tokens(config.max_new_tokens)
        self.sizes.assume("every response is as long as it may be")
        policy = count(self.model, config.policy_optimizer)
        value = count(self.model, config.value_optimizer, num_scores=1)
        reward = count(self.model, config.value_optimizer, num_scores=max(1, len(config.objective_weights)))
        rollout_rows = config.rollout_batch_size // layout.ranks
        micro_batches = batch.num_micro_batches(layout.ranks)
        # Pretraining rows ride along with each micro-batch of responses.
        ptx, ptx_tokens = math.ceil(config.ptx_rows / layout.ranks / micro_batches), self._ptx_tokens(config)
        of = forward_pass(self.model, layout, batch.micro_batch_size + ptx, max(seq_len, ptx_tokens))
        counted = batch.micro_batch_size * config.max_new_tokens + ptx * ptx_tokens
        logits = counted * self.model.vocab_size
        memory = ppo_memory(self.model, policy, value, reward, layout, of, logits, rollout_rows, micro_batches)
        numbers = {
            "rollout_batch_size": config.rollout_batch_size,
            "batch_size": batch.batch_size,
            "micro_batch_size": batch.micro_batch_size,
            "ranks": layout.ranks,
            "micro-batches a rank and update": micro_batches,
            "updates an iteration": config.updates_per_iteration,
            "iterations": config.num_iterations,
            "updates": config.num_iterations * config.updates_per_iteration,
            "responses": config.num_iterations * config.rollout_batch_size,
            "tokens an iteration": config.rollout_batch_size * seq_len,
        }
        learning = self.times.compute_seconds(self._ppo_flops(config, policy, value, seq_len))
        if config.placement == "disaggregated":
            self.sizes.assume("memory is that of a rank with all roles; the scorers' work is counted as the learners'")
            rollout_rows = config.rollout_batch_size // config.num_generators
        sampling = self.times.sampling_seconds(policy.total, rollout_rows, seq_len, config.max_new_tokens)
        seconds = max(learning, sampling) if config.max_staleness else learning + sampling
        return self._stage("ppo", "responses", numbers, memory, config.num_iterations, seconds)

    def _ptx_tokens(self, config: PPOConfig) -> int:
        return self.job.pretrain.seq_len if config.ptx_rows and self.job.pretrain else 0

    def _ppo_flops(self, config: PPOConfig, policy: Counts, value: Counts, seq_len: int) -> float:
        """An iteration without sampling: one pass each of policy, reference, value function and reward model, then the
        epochs' updates of policy and value function, and the pretraining rows. Heads read the responses alone.
        """
        tokens = config.rollout_batch_size * seq_len
        share = config.max_new_tokens / seq_len
        body, with_head = self.times.forward_flops(seq_len, 0.0), self.times.forward_flops(seq_len, share)
        looking = 2 * with_head + 2 * body
        learning = config.num_epochs * (self.times.passes(policy) * with_head + self.times.passes(value) * body)
        ptx_tokens = self._ptx_tokens(config)
        ptx_flops = self.times.passes(policy) * self.times.forward_flops(ptx_tokens or 1, 1.0)
        return tokens * (looking + learning) + config.ptx_rows * config.updates_per_iteration * ptx_tokens * ptx_flops

    def _stage(
        self, name: str, unit: str, numbers: dict[str, int], memory: Memory, num_steps: int, seconds: float
    ) -> StagePlan:
        return StagePlan(name, unit, numbers, memory, num_steps, seconds, self.sizes.taken())


_ANY_OPTIMIZER = OptimizerConfig(learning_rate=1.0, schedule="constant")
