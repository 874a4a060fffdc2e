"""Memory of PPO's ranks: learners, generators and scorers, or colocated ranks, which have all three roles."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from heed.jobs.memory import (
    CPU_COPY,
    GENERATION_ROWS,
    RESERVED_BYTES,
    Counts,
    Layout,
    Memory,
    casts_of,
    count,
    forward_pass,
    held_logits,
    host_states,
    logit_bytes,
    rows_and_passes,
    rows_at_once,
    sampling_phase,
    scoring_phase,
    scoring_rows,
    states,
    training_phases,
    weights_to_save,
)
from lm.config import ModelConfig
from lm.inspection import Pass, forward_bytes
from lm.samplers.draws import AT_ONCE
from lm.samplers.vllm_engine import GPU_MEMORY_SHARE, GPU_MEMORY_SHARE_OF_GUEST
from lm.tensor_parallel import config_of_part, parameters_of_part
from lm.transfer import MAX_ROWS, MAX_TOKENS
from training.config import OptimizerConfig

if TYPE_CHECKING:  # the GPU benchmarks count memory on machines without Ray and pydantic
    from ppo.plan import PPOIteration

FROZEN = OptimizerConfig(learning_rate=1.0)  # for counting parameters that no optimizer trains
CHUNK_BYTES = 1 << 28  # lm.samplers.engine: a chunk ends once it has this many
DIGESTED_AT_ONCE = 1 << 21  # likewise: elements hashed at once, 16 bytes each
GENERATE, SYNC = "generate", "sync"  # phases in which a generator holds weights
ARRIVING = "weights on their way"
VALUES = "values"  # the phase in which the value function scores samples
MEASURE = "measure"  # the phase in which policy, reference and value function measure samples on their shared body
REFERENCE, REWARD = "score by the reference", "score by the reward model"
Parts = Mapping[str, int]
Mode = Literal["fast", "balanced", "small"]


@dataclass(frozen=True)
class PPOModels:
    """Shapes and parameter counts. The reference has the policy's shape, the value function the reward model's.

    `value_counts` is None without a value function, `reward_counts` if the reward does not come from a model.
    """

    policy: ModelConfig
    critic: ModelConfig
    policy_counts: Counts
    value_counts: Counts | None
    reward_counts: Counts | None
    teachers: tuple[tuple[ModelConfig, Counts], ...] = ()
    judges: tuple[tuple[ModelConfig, Counts], ...] = ()


@dataclass(frozen=True)
class PPOWork:
    """A rank's work in one iteration."""

    policy_pass: Pass  # one micro-batch of prompts with responses, through the policy
    critic_pass: Pass  # the same micro-batch through the critic
    scoring_pass: Pass  # through the critic without gradients, for values and scores
    num_logits: int  # per micro-batch
    rollout_rows: int  # responses that a rank samples
    prompt_tokens: int  # of each
    response_tokens: int  # of each
    num_micro_batches: int
    mode: Mode = "fast"  # ppo.memory
    team_size: int = 1  # ranks that sample together: ppo.sampler.tensor_parallel_size
    has_average: bool = True
    shares_body: bool = False  # ppo.lora.shared_body
    gpu_bytes: int = 0  # memory of a GPU, which limits the rows sampled at once; 0 = no limit
    engine_bytes: int = 0  # that vLLM takes of a GPU, whatever it needs; 0 = Heed's sampler


def learner(models: PPOModels, layout: Layout, work: PPOWork) -> Memory:
    """Returns the memory of a learner: policy and value function in training, and its shard of the moving average.

    The average is in CPU memory unless the mode is `fast`. Weights are sent to generators one whole tensor at a time.
    """
    policy, c = models.policy_counts, layout.compute_bytes
    held, host, phases = dict[str, int](), dict[str, int](), dict[str, Parts]()
    trained = [("policy", models.policy, policy, work.policy_pass, work.num_logits)]
    value = models.value_counts
    if value is not None:
        if work.shares_body:  # its frozen weights are the policy's
            value = replace(value, total=value.trained, linear=value.linear - value.rounded, rounded=0)
        trained.append(("value", models.critic, value, work.critic_pass, 0))
    for name, config, counts, of, logits in trained:
        held |= {f"{name}: {part}": size for part, size in states(counts, layout).items()}
        host |= {f"{name}: {part}": size for part, size in host_states(counts, layout).items()}
        training = training_phases(config, counts, layout, of, logits, work.num_micro_batches)
        phases |= {f"{name} {phase}": parts for phase, parts in training.items()}
    if work.shares_body:
        phases |= _shared_phases(models, layout, work)
    else:
        if value is not None:
            phases[VALUES] = scoring_phase(models.critic, value, layout, work.scoring_pass)
        if policy.ranks:  # the reference is then the policy without its adapters
            num_logits = held_logits(models.policy, layout, work.policy_pass, work.num_logits)
            logits = logit_bytes(num_logits, layout, with_gradient=False)
            head = casts_of(policy, layout) + logits  # of the frozen body, only the head's table is rounded in passes
            phases[REFERENCE] = {"a pass, or logits": max(forward_bytes(models.policy, work.policy_pass), head)}
    average = 4 * policy.trained // layout.ranks if work.has_average else 0
    (held if work.mode == "fast" or not layout.is_gpu else host)["moving average"] = average
    (host if layout.is_gpu else held)["copy of the average for checkpoints"] = average
    # Tensors are copied if they have to be gathered or rounded for the generator; otherwise they are sent in place.
    is_copied = layout.zero_stage == 3 or (layout.is_bf16 and (layout.is_autocast or policy.ranks > 0))
    chunk = min(CHUNK_BYTES + 2 * c * policy.largest, c * (policy.total if is_copied else policy.adapted))
    merging = 3 * 4 * policy.largest_adapted  # a map, its addition and their sum, in fp32
    digest = 16 * min(DIGESTED_AT_ONCE, policy.largest)
    phases[SYNC] = {ARRIVING: chunk + max(merging, digest)}
    return Memory(held, phases, host, weights_to_save(policy, layout))


def _shared_phases(models: PPOModels, layout: Layout, work: PPOWork) -> dict[str, Parts]:
    """Returns the phases without gradients on a shared body: policy, reference and value function read one batch
    together, and the reward model reads another.
    """
    num_readers = 2 if models.value_counts is None else 3
    rows = replace(work.policy_pass, rows=num_readers * work.policy_pass.rows)
    hidden = rows.num_tokens * models.policy.hidden_size * rows.compute_bytes
    logits = hidden + logit_bytes(work.num_logits, layout, with_gradient=False)
    # The test of draws copies some of the logits, and holds their log-probabilities and probabilities in fp32. On a
    # CPU it takes at most 90 MB, which are not counted.
    draws = (layout.compute_bytes + 8) * min(work.num_logits, AT_ONCE) if layout.is_gpu else 0
    head = casts_of(models.policy_counts, layout) + logits + draws
    together = {"a pass of all readers, or logits": max(forward_bytes(models.policy, rows), head)}
    return {MEASURE: together, REWARD: {"a pass": forward_bytes(models.critic, work.scoring_pass)}}


def generator(models: PPOModels, layout: Layout, work: PPOWork, other_bytes: int = 0) -> Memory:
    """Returns the memory of a generator: weights in the compute dtype, and sampling. Other roles hold `other_bytes`.

    In a team, a rank has the cache and the activations of its own heads, but whole logits. Whole tensors arrive in
    chunks, and are then cut. vLLM fills all that it may take with its cache as it starts, and sleeps when Heed's
    generator would leave the GPU.
    """
    policy, size, config, phases = models.policy_counts, work.team_size, models.policy, dict[str, Parts]()
    P = policy.total - (policy.trained if policy.ranks else 0)  # it receives merged weights
    if size > 1:
        arriving = min(CHUNK_BYTES + 2 * layout.compute_bytes * policy.largest, layout.compute_bytes * P)
        phases[SYNC] = {ARRIVING: arriving, "a rank's parts of them": arriving // size}
        P, config = parameters_of_part(config, size), config_of_part(config, size)
    weights = layout.compute_bytes * P
    if work.engine_bytes:
        held = {"generator": weights, "vLLM's cache and work space": max(0, work.engine_bytes - weights)}
        if weights > work.engine_bytes:  # the weights need a GPU of which they are vLLM's part
            held["part of the GPU that vLLM leaves to others"] = weights * work.gpu_bytes // work.engine_bytes - weights
        return Memory(held, {GENERATE: {}, **phases})
    rows, seq_len = min(GENERATION_ROWS, work.rollout_rows * size), work.prompt_tokens + work.response_tokens
    rows = rows_at_once(config, layout, work.gpu_bytes - other_bytes - weights if work.gpu_bytes else 0, rows, seq_len)
    phases[GENERATE] = phase = sampling_phase(config, layout, P, rows, work.prompt_tokens, work.response_tokens)
    if size > 1 and not layout.is_bf16:
        phase.pop(CPU_COPY, None)  # Heed's decoding kernels are for a whole model
    return Memory({"generator": weights}, phases)


@dataclass(frozen=True)
class _Frozen:
    """A model of a scorer. `in_fp32` numbers of its linear layers stay in fp32 under autocast."""

    config: ModelConfig
    counts: Counts
    in_fp32: int
    pass_bytes: int


def _frozen_models(models: PPOModels, layout: Layout, work: PPOWork) -> dict[str, _Frozen]:
    """Returns the teachers, the reference and the reward model. They read whole rows."""
    read, scored = replace(work.policy_pass, split_among=1), replace(work.scoring_pass, split_among=1)
    readers = {f"teacher {number}": teacher for number, teacher in enumerate(models.teachers, 1)}
    if not models.policy_counts.ranks:  # otherwise the reference is the policy without its adapters
        readers["reference"] = (models.policy, models.policy_counts)
    frozen = dict[str, _Frozen]()
    for name, (config, counts) in readers.items():
        shared = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
        num_logits = work.num_logits * config.vocab_size // models.policy.vocab_size
        logits = logit_bytes(held_logits(config, layout, read, num_logits), layout, with_gradient=False)
        frozen[name] = _Frozen(config, counts, shared, max(forward_bytes(config, read), logits))
    if models.reward_counts is not None:
        pass_bytes = forward_bytes(models.critic, scored)
        frozen["reward model"] = _Frozen(models.critic, models.reward_counts, 0, pass_bytes)
    return frozen


def scorer(models: PPOModels, layout: Layout, work: PPOWork) -> Memory:
    """Returns the memory of a scorer: the reference, the teachers, the reward model and the judges, which run one after
    the other.

    `fast` holds all. The other modes shard them in CPU memory and gather the one that runs, whole or layer by layer.
    """
    if work.shares_body:
        assert models.reward_counts is not None, "a body is shared with a reward model"
        return Memory({"reward model's adapter": layout.weight_bytes * models.reward_counts.trained}, {})
    held, host, phases = dict[str, int](), dict[str, int](), dict[str, Parts]()
    for name, of in _frozen_models(models, layout, work).items():
        size = _frozen_bytes(of.counts.total, of.counts.linear - of.in_fp32, layout)
        passes = {"a pass": of.pass_bytes}
        if work.mode == "fast":
            held[name] = size
        else:
            (host if layout.is_gpu else held)[f"share of the {name}"] = size // layout.ranks
        if work.mode == "balanced":
            # The ranks gather it before the passes, from shards on the device or through gloo into a copy.
            gathering = 0 if layout.ranks == 1 else size // layout.ranks if layout.is_gpu else size
            passes = {"a pass, or a share": max(of.pass_bytes, gathering), name: size}
        elif work.mode == "small":
            in_blocks = of.config.num_hidden_layers * of.counts.block
            outside, in_products = of.counts.total - in_blocks, of.counts.linear - of.in_fp32 - in_blocks
            passes[f"{name} outside its layers"] = _frozen_bytes(outside, max(0, in_products), layout)
            passes["one of its layers"] = _frozen_bytes(of.counts.layer, of.counts.layer, layout)
        phases[f"score by the {name}"] = passes
    size = 2 if layout.is_gpu else 4  # a judge computes in the types of `lm.source`: bf16 on a GPU, otherwise fp32
    for number, (config, counts) in enumerate(models.judges, 1):
        name = f"judge {number}" if len(models.judges) > 1 else "judge"
        width = min(config.max_position_embeddings, MAX_TOKENS)
        read = replace(work.scoring_pass, rows=min(MAX_ROWS, MAX_TOKENS // width), seq_len=width)
        read = replace(read, compute_bytes=size, stream_bytes=size, split_among=1)
        held[name] = size * counts.total
        phases[f"score by the {name}"] = {"a pass": forward_bytes(config, read)}
    return Memory(held, phases, host)


def _frozen_bytes(total: int, in_products: int, layout: Layout) -> int:
    """Returns the bytes of a frozen model. With autocast, weights of linear layers are bf16 and the rest is fp32,
    including an embedding table that the head shares.
    """
    return 4 * total - 2 * in_products if layout.is_autocast else layout.compute_bytes * total


def ppo_memory(models: PPOModels, layout: Layout, work: PPOWork) -> Memory:
    """Returns the memory of a colocated rank, which has all roles."""
    learning, scoring = learner(models, layout, work), scorer(models, layout, work)
    other_roles = {**learning.held, **scoring.held}
    is_away = work.mode == "small" and layout.is_gpu
    sampling = generator(
        models, layout, work, sum(size for part, size in other_roles.items() if not (is_away and _moves(part)))
    )
    phases = {**learning.phases, **sampling.phases, **scoring.phases}
    phases[SYNC] = {**sampling.phases.get(SYNC, {}), **learning.phases[SYNC]}
    held = {**learning.held, **sampling.held, **scoring.held}
    host = {**learning.host, **scoring.host}
    if work.mode != "fast":  # the generator holds weights only from the sync until it has sampled
        phases = _only_in(phases, {part: held.pop(part) for part in sampling.held}, (GENERATE, SYNC))
    if work.mode == "small":  # in CPU memory from before sampling until the next update
        away = {part: held.pop(part) for part in list(held) if _moves(part)}
        (host if layout.is_gpu else held).update({f"{part}, while others work": size for part, size in away.items()})
        others = (GENERATE, VALUES, MEASURE, REFERENCE, REWARD, *scoring.phases)
        phases = _only_in(phases, away, tuple(name for name in phases if name not in others))
    return Memory(held, phases, host, learning.host_once)


def _moves(part: str) -> bool:
    """Returns whether the mode "small" moves a part to CPU memory."""
    return part.endswith((": moments", ": fp32 masters"))


def _only_in(phases: Mapping[str, Parts], parts: Parts, names: tuple[str, ...]) -> dict[str, Parts]:
    """Adds `parts` to the phases with these names."""
    return {name: {**before, **(parts if name in names else {})} for name, before in phases.items()}


def models_of(work: "PPOIteration") -> PPOModels:
    """Returns the models' parameter counts."""
    config, value = work.config, work.config.value_optimizer
    num_objectives = max(1, len(config.reward.objective_weights))
    lora = work.shared_adapter or config.lora
    return PPOModels(
        work.policy,
        work.critic,
        count(work.policy, config.policy_optimizer, lora=config.lora),
        None if value is None else count(work.critic, value, num_scores=1, lora=lora),
        None
        if config.external_reward
        else count(work.critic, FROZEN, num_scores=num_objectives, lora=work.shared_adapter),
        tuple((shape, count(shape, FROZEN)) for shape in work.teachers),
        tuple((shape, count(shape, FROZEN)) for shape in work.judges),
    )


def rank_work(work: "PPOIteration", layout: Layout, gpu_bytes: int) -> PPOWork:
    """Returns the work of each rank. Every micro-batch of responses also has its share of the pretraining rows.

    A pass has as many tokens as `micro_batch_size` of the longest prompts with responses. If prompts are shorter,
    it holds more responses, and so more logits.
    """
    config, lengths, seq_len = work.config, work.lengths, work.lengths.longest
    # A reward model reads a truncated response with an end token added.
    width, scored_width = (layout.packed_width(tokens) for tokens in (seq_len, seq_len + 1))
    batch = config.minibatch
    rows, micro_batches = rows_and_passes(batch, layout.shares, width)
    responses = min(batch.batch_size // layout.shares, rows * seq_len // lengths.shortest)
    ptx = math.ceil(config.ptx_rows / layout.shares / micro_batches)
    engine_bytes = 0
    if layout.is_gpu and config.sampler.has_own_process:
        share = GPU_MEMORY_SHARE_OF_GUEST if config.placement.roles_share_ranks else GPU_MEMORY_SHARE
        engine_bytes = round(share * gpu_bytes)
    return PPOWork(
        forward_pass(layout, rows + ptx, max(width, work.ptx_tokens), is_trained=True),
        forward_pass(layout, rows, width, is_trained=True),
        forward_pass(layout, scoring_rows(batch, scored_width), scored_width, is_trained=True),
        (max(rows, responses) * config.max_new_tokens + ptx * work.ptx_tokens) * work.policy.vocab_size,
        config.sampled_batch_size // (config.placement.num_generators or layout.ranks),
        seq_len - config.max_new_tokens,
        config.max_new_tokens,
        micro_batches,
        config.memory,
        team_size=config.sampler.tensor_parallel_size,
        has_average=config.ema.decay > 0,
        shares_body=config.shared_body,
        gpu_bytes=gpu_bytes and gpu_bytes - RESERVED_BYTES,
        engine_bytes=engine_bytes,
    )
