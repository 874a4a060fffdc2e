"""What the ranks of PPO hold: learners, generators and scorers, or ranks that are all three (colocated)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lm.activations import Pass, forward_bytes
from lm.config import ModelConfig
from planning.memory import Counts, Layout, Memory
from planning.sampling import GENERATION_ROWS, rows_at_once, sampling_phase
from planning.training import host_states, logit_bytes, states, training_phases, weights_to_save

Parts = Mapping[str, int]
Mode = Literal["fast", "balanced", "small"]

CHUNK_BYTES = 1 << 28  # ppo.sent_weights: a chunk ends once it has so many
SUMMED_AT_ONCE = 1 << 22  # likewise: numbers whose bits are summed at once, as 8 bytes each
GENERATE, SYNC = "generate", "sync"  # phases in which a generator has weights


@dataclass(frozen=True)
class PPOModels:
    """The policy's shape, which the reference shares, and that of the reward model and value function. Without
    `reward_counts` the reward comes from no model.
    """

    policy: ModelConfig
    critic: ModelConfig
    policy_counts: Counts
    value_counts: Counts
    reward_counts: Counts | None


@dataclass(frozen=True)
class PPOWork:
    """One micro-batch of prompts with their responses as the policy and as the critic read it, its logits, and the
    responses that a rank samples per iteration, of so many tokens. `mode` is `ppo.memory`; `generator_ranks` share a
    generator's weights. `gpu_bytes` are the memory of a GPU, which limits the rows that are sampled at once; 0 = any.
    """

    policy_pass: Pass
    critic_pass: Pass
    num_logits: int
    rollout_rows: int
    response_tokens: int
    num_micro_batches: int
    mode: Mode = "fast"
    generator_ranks: int = 1
    has_average: bool = True
    gpu_bytes: int = 0


@dataclass(frozen=True)
class Role:
    """What one role holds throughout, what each phase adds, and what it takes of its node's memory."""

    held: Parts
    phases: Mapping[str, Parts] = field(default_factory=dict)
    host: Parts = field(default_factory=dict)
    host_once: Parts = field(default_factory=dict)

    def memory(self) -> Memory:
        return Memory(self.held, self.phases, self.host, self.host_once)


def learner(models: PPOModels, layout: Layout, work: PPOWork) -> Role:
    """Policy and value function under training, and this rank's part of the moving average, in CPU memory unless
    `fast`. Weights on their way to generators are whole one tensor at a time.
    """
    policy, c = models.policy_counts, layout.compute_bytes
    held, host, phases = dict[str, int](), dict[str, int](), dict[str, Parts]()
    for name, config, counts, of, logits in (
        ("policy", models.policy, policy, work.policy_pass, work.num_logits),
        ("value", models.critic, models.value_counts, work.critic_pass, 0),
    ):
        held |= {f"{name}: {part}": size for part, size in states(counts, layout).items()}
        host |= {f"{name}: {part}": size for part, size in host_states(counts, layout).items()}
        found = training_phases(config, counts, layout, of, logits, work.num_micro_batches)
        phases |= {f"{name} {phase}": parts for phase, parts in found.items()}
    average = 4 * policy.trained // layout.ranks if work.has_average else 0
    (held if work.mode == "fast" or not layout.is_gpu else host)["moving average"] = average
    (host if layout.is_gpu else held)["copy of the average for checkpoints"] = average
    # Whole tensors that are gathered, or rounded for the generator; elsewhere they are the weights themselves.
    is_copied = layout.zero_stage == 3 or layout.is_autocast
    chunk = min(CHUNK_BYTES + 2 * c * policy.largest_trained, c * policy.total) if is_copied else 0
    phases[SYNC] = {"weights on their way": chunk + 8 * min(SUMMED_AT_ONCE, policy.largest_trained)}
    return Role(held, phases, host, weights_to_save(policy, layout))


def generator(models: PPOModels, layout: Layout, work: PPOWork, beside: int = 0) -> Role:
    """The policy's weights in the type of a product, and what sampling takes. Other roles hold `beside` bytes."""
    P, shared_by = models.policy_counts.total, work.generator_ranks
    weights = layout.compute_bytes * P // shared_by
    rows = min(GENERATION_ROWS, work.rollout_rows * shared_by)
    free = (work.gpu_bytes - beside - weights) * shared_by if work.gpu_bytes else 0
    prompt_tokens = work.policy_pass.seq_len - work.response_tokens
    rows = rows_at_once(models.policy, layout, free, rows, work.policy_pass.seq_len)
    phase = sampling_phase(models.policy, layout, P, rows, prompt_tokens, work.response_tokens)
    phases = {GENERATE: {name: size // shared_by for name, size in phase.items()}}
    return Role({"generator": weights}, phases)


def scorer(models: PPOModels, layout: Layout, work: PPOWork) -> Role:
    """The reference and the reward model, which score one after the other; `fast` holds both, the other modes keep
    shares of them in CPU memory and gather the one that scores, whole or layer by layer.
    """
    shared = models.policy.vocab_size * models.policy.hidden_size if models.policy.tie_word_embeddings else 0
    logits = logit_bytes(work.num_logits, layout, with_gradient=False)
    both = {"reference": (models.policy, models.policy_counts, shared, work.policy_pass, logits)}
    if models.reward_counts is not None:
        both["reward model"] = (models.critic, models.reward_counts, 0, work.critic_pass, 0)
    held, host, phases = dict[str, int](), dict[str, int](), dict[str, Parts]()
    for name, (config, counts, in_fp32, of, more) in both.items():
        size = _frozen_bytes(counts.total, counts.linear - in_fp32, layout)
        needed = max(forward_bytes(config, of), more)
        passes = {"a pass": needed}
        if work.mode == "fast":
            held[name] = size
        elif layout.is_gpu:
            host[f"share of the {name}"] = size // layout.ranks
        else:
            held[f"share of the {name}"] = size // layout.ranks
        if work.mode == "balanced":
            # Before the passes the ranks gather it: from a share on the device, or by gloo into a copy.
            gathering = 0 if layout.ranks == 1 else size // layout.ranks if layout.is_gpu else size
            passes = {"a pass, or a share": max(needed, gathering), name: size}
        elif work.mode == "small":
            outside = counts.total - config.num_hidden_layers * counts.block
            layer = _frozen_bytes(counts.layer, counts.layer, layout)
            in_matrices = counts.linear - in_fp32 - config.num_hidden_layers * counts.block
            passes |= {
                f"{name} outside its layers": _frozen_bytes(outside, max(0, in_matrices), layout),
                "one of its layers": layer,
            }
        phases[f"score by the {name}"] = passes
    return Role(held, phases, host)


def _frozen_bytes(total: int, in_products: int, layout: Layout) -> int:
    """Bytes of a model that stays fixed. Next to autocast, matrices of products are bf16 and the rest, the table that a
    head shares too, is fp32.
    """
    return 4 * total - 2 * in_products if layout.is_autocast else layout.compute_bytes * total


def ppo_memory(models: PPOModels, layout: Layout, work: PPOWork) -> Memory:
    """A colocated rank, which has all roles."""
    learning, scoring = learner(models, layout, work), scorer(models, layout, work)
    beside = {**learning.held, **scoring.held}
    is_away = work.mode == "small" and layout.is_gpu
    sampling = generator(
        models, layout, work, sum(size for part, size in beside.items() if not (is_away and _moves(part)))
    )
    phases = {**learning.phases, **sampling.phases, **scoring.phases}
    held = {**learning.held, **sampling.held, **scoring.held}
    host = {**learning.host, **scoring.host}
    if work.mode != "fast":  # the generator has weights from when they are sent until it has sampled
        phases = _only_in(phases, {part: held.pop(part) for part in sampling.held}, (GENERATE, SYNC))
    if work.mode == "small":  # from before sampling until the next update
        away = {part: held.pop(part) for part in list(held) if _moves(part)}
        (host if layout.is_gpu else held).update({f"{part}, while others work": size for part, size in away.items()})
        others = (GENERATE, *scoring.phases)
        phases = _only_in(phases, away, tuple(name for name in phases if name not in others))
    return Memory(held, phases, host, learning.host_once)


def _moves(part: str) -> bool:
    """Whether "small" sends it to CPU memory."""
    return part.endswith((": moments", ": fp32 masters"))


def _only_in(phases: Mapping[str, Parts], parts: Parts, names: tuple[str, ...]) -> dict[str, Parts]:
    """The phases, with these parts in some of them."""
    return {name: {**found, **(parts if name in names else {})} for name, found in phases.items()}
