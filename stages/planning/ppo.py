"""Memory of PPO's ranks: learners, generators and scorers, or colocated ranks, which have all three roles.

Learners may keep the forward passes from when they measure an iteration's tokens until the first update
(`ppo.kept_passes`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lm.config import ModelConfig
from lm.inspection import Pass, forward_bytes
from lm.native.kernels import library
from lm.samplers.draws import AT_ONCE
from lm.tensor_parallel import config_of_part, parameters_of_part
from lm.transfer import MAX_ROWS, MAX_TOKENS
from stages.planning.memory import (
    CPU_COPY,
    GENERATION_ROWS,
    Counts,
    KeptPass,
    Layout,
    Memory,
    casts_of,
    host_states,
    logit_bytes,
    logits_at_once,
    own_logits,
    rows_at_once,
    sampling_phase,
    scoring_phase,
    states,
    training_phases,
    weights_to_save,
)

Parts = Mapping[str, int]
Mode = Literal["fast", "balanced", "small"]

CHUNK_BYTES = 1 << 28  # lm.samplers.engine: a chunk ends once it has this many
DIGESTED_AT_ONCE = 1 << 21  # likewise: elements hashed at once, 16 bytes each
KEPT_BYTES = 4 << 30  # of a rank's memory, for passes of policy and value function together
GENERATE, SYNC = "generate", "sync"  # phases in which a generator holds weights
ARRIVING = "weights on their way"
VALUES = "values"  # the phase in which the value function scores samples
MEASURE = "measure"  # the phase in which policy, reference and value function measure samples on their shared body
REFERENCE, REWARD = "score by the reference", "score by the reward model"


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
    keeps: tuple[str, ...] = ()  # the trained models that keep passes for the first update (`KeptPasses`)


@dataclass(frozen=True)
class Role:
    """Bytes of one role, with the fields of `stages.planning.memory.Memory`."""

    held: Parts
    phases: Mapping[str, Parts] = field(default_factory=dict)
    host: Parts = field(default_factory=dict)
    host_once: Parts = field(default_factory=dict)

    def memory(self) -> Memory:
        return Memory(self.held, self.phases, self.host, self.host_once)


def keeps_passes(layout: Layout, mode: str, *, has_ptx: bool, shares_body: bool) -> bool:
    """Returns whether learners keep passes: on CPUs, without ZeRO, if `ppo.memory` is "fast".

    A GPU has little memory for activations of more than one micro-batch. DeepSpeed pairs each forward with the next
    backward, and recomputed blocks would keep little and save nothing. On a shared body, the passes that measure are
    not those that learn. Without Heed's kernels, autocast adds up the gradients of the policy loss and of a pretraining
    loss in bf16 if both passes use the same bf16 copy of a weight, so separate passes would give different bits.
    """
    is_possible = layout.zero_stage == 0 and not layout.recomputes and not shares_body
    adds_up_in_bf16 = layout.is_autocast and has_ptx and library() is None
    return is_possible and mode == "fast" and not layout.is_gpu and not adds_up_in_bf16


@dataclass(frozen=True)
class KeptPasses:
    """The passes that a model keeps: `num_kept` of an update's `num_passes`."""

    each: KeptPass
    num_kept: int
    num_passes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all kept passes, with the bf16 weights that they share."""
        casts = casts_of(self.each.counts, self.each.layout) if self.num_kept else 0
        return self.num_kept * self.each.num_bytes + casts

    def phases(self, of: Pass, num_logits: int, others: int) -> dict[str, Mapping[str, int]]:
        """Returns the phases of the update that consumes the kept passes. A micro-batch's `of` and `num_logits` are as
        in other updates; `others` are the bytes of passes that another model keeps meanwhile.

        During the first backward pass all kept passes exist. During the second, one is gone and there are gradients.
        """
        shape = self.each.config, self.each.counts, self.each.layout, of, num_logits
        first, second = training_phases(*shape, 1), training_phases(*shape, 2)
        kept = [max(0, self.num_kept - taken) * self.each.num_bytes + others for taken in (1, 2)]
        phases: dict[str, Mapping[str, int]] = {
            "backward, passes kept": {**first["backward"], "passes kept": kept[0]},
            "step, passes kept": {**first["step"], "passes kept": others},
        }
        if self.num_passes > 1:
            phases["second backward, passes kept"] = {**second["backward"], "passes kept": kept[1]}
        return phases


def learner(models: PPOModels, layout: Layout, work: PPOWork) -> Role:
    """Returns the memory of a learner: policy and value function in training, and its shard of the moving average.

    The average is in CPU memory unless the mode is `fast`. Weights are sent to generators one whole tensor at a time.
    """
    policy, c = models.policy_counts, layout.compute_bytes
    held, host, phases = dict[str, int](), dict[str, int](), dict[str, Parts]()
    trained = [("policy", models.policy, policy, work.policy_pass, work.num_logits)]
    value = models.value_counts
    if value is not None:
        trained.append(("value", models.critic, on_body(value) if work.shares_body else value, work.critic_pass, 0))
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
            num_logits = own_logits(models.policy, work.policy_pass, work.num_logits)
            num_logits = logits_at_once(models.policy, num_logits, layout)
            logits = logit_bytes(num_logits, layout, with_gradient=False)
            head = casts_of(policy, layout) + logits  # of the frozen body, only the head's table is rounded in passes
            phases[REFERENCE] = {"a pass, or logits": max(forward_bytes(models.policy, work.policy_pass), head)}
    phases |= _kept_phases(kept_passes(models, layout, work), work, phases)
    average = 4 * policy.trained // layout.ranks if work.has_average else 0
    (held if work.mode == "fast" or not layout.is_gpu else host)["moving average"] = average
    (host if layout.is_gpu else held)["copy of the average for checkpoints"] = average
    # Tensors are copied if they have to be gathered or rounded for the generator; otherwise they are sent in place.
    is_copied = layout.zero_stage == 3 or (layout.is_bf16 and (layout.is_autocast or policy.ranks > 0))
    chunk = min(CHUNK_BYTES + 2 * c * policy.largest, c * (policy.total if is_copied else policy.adapted))
    merging = 3 * 4 * policy.largest_adapted  # a map, its addition and their sum, in fp32
    digest = 16 * min(DIGESTED_AT_ONCE, policy.largest)
    phases[SYNC] = {ARRIVING: chunk + max(merging, digest)}
    return Role(held, phases, host, weights_to_save(policy, layout))


def kept_passes(models: PPOModels, layout: Layout, work: PPOWork) -> dict[str, KeptPasses]:
    """Returns the passes that the trained models keep for the first update: the policy's, then the value function's, up
    to the memory limit.
    """
    num_logits = work.critic_pass.rows * work.response_tokens * models.policy.vocab_size
    num_logits = own_logits(models.policy, work.critic_pass, num_logits)
    shapes = {"policy": (models.policy, models.policy_counts, num_logits)}
    if models.value_counts is not None:
        shapes["value"] = (models.critic, models.value_counts, 0)
    kept, free = dict[str, KeptPasses](), KEPT_BYTES
    for name in work.keeps:
        config, counts, logits = shapes[name]
        each = KeptPass(config, counts, layout, work.critic_pass, logits)
        kept[name] = KeptPasses(each, each.num_kept(work.num_micro_batches, free), work.num_micro_batches)
        free -= kept[name].num_kept * each.num_bytes
    return kept


def _kept_phases(kept: Mapping[str, KeptPasses], work: PPOWork, phases: Mapping[str, Parts]) -> dict[str, Parts]:
    """Returns the phases that kept passes change: the first updates, and the measuring that follows the kept passes."""
    if not kept:
        return {}
    others = kept["value"].num_bytes if "value" in kept else 0
    policy_phases = kept["policy"].phases(work.policy_pass, work.num_logits, others)
    new: dict[str, Parts] = {f"policy {phase}": parts for phase, parts in policy_phases.items()}
    if "value" in kept:
        new |= {f"value {phase}": parts for phase, parts in kept["value"].phases(work.critic_pass, 0, 0).items()}
    measured = {VALUES: kept["policy"].num_bytes + others, REFERENCE: kept["policy"].num_bytes}
    return new | {name: {**phases[name], "passes kept": size} for name, size in measured.items() if name in phases}


def on_body(counts: Counts) -> Counts:
    """Returns the counts of a model whose frozen weights belong to another model."""
    return replace(counts, total=counts.trained, linear=counts.linear - counts.rounded, rounded=0)


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


def generator(models: PPOModels, layout: Layout, work: PPOWork, other_bytes: int = 0) -> Role:
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
        return Role(held, {GENERATE: {}, **phases})
    rows, seq_len = min(GENERATION_ROWS, work.rollout_rows * size), work.prompt_tokens + work.response_tokens
    rows = rows_at_once(config, layout, work.gpu_bytes - other_bytes - weights if work.gpu_bytes else 0, rows, seq_len)
    phases[GENERATE] = phase = sampling_phase(config, layout, P, rows, work.prompt_tokens, work.response_tokens)
    if size > 1 and not layout.is_bf16:
        phase.pop(CPU_COPY, None)  # Heed's decoding kernels are for a whole model
    return Role({"generator": weights}, phases)


def scorer(models: PPOModels, layout: Layout, work: PPOWork) -> Role:
    """Returns the memory of a scorer: the reference, the teachers, the reward model and the judges, which run one after
    the other.

    `fast` holds all. The other modes shard them in CPU memory and gather the one that runs, whole or layer by layer.
    """
    if work.shares_body:
        assert models.reward_counts is not None, "a body is shared with a reward model"
        return Role({"reward model's adapter": layout.weight_bytes * models.reward_counts.trained})
    readers = {f"teacher {number}": teacher for number, teacher in enumerate(models.teachers, 1)}
    if not models.policy_counts.ranks:
        readers["reference"] = (models.policy, models.policy_counts)
    frozen = dict[str, tuple[ModelConfig, Counts, int, Pass, int]]()
    for name, (config, counts) in readers.items():
        shared = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
        num_logits = work.num_logits * config.vocab_size // models.policy.vocab_size
        num_logits = logits_at_once(config, num_logits, layout)
        logits = logit_bytes(num_logits, layout, with_gradient=False)
        frozen[name] = (config, counts, shared, work.policy_pass, logits)
    if models.reward_counts is not None:
        frozen["reward model"] = (models.critic, models.reward_counts, 0, work.scoring_pass, 0)
    held, host, phases = dict[str, int](), dict[str, int](), dict[str, Parts]()
    for name, (config, counts, in_fp32, split, more) in frozen.items():
        of = replace(split, split_among=1)  # a frozen model reads whole rows
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
            # The ranks gather it before the passes, from shards on the device or through gloo into a copy.
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
    for number, (config, counts) in enumerate(models.judges, 1):
        name = f"judge {number}" if len(models.judges) > 1 else "judge"
        # It computes in the types of `lm.source`: bf16 on a GPU, otherwise fp32.
        size = 2 if layout.is_gpu else 4
        held[name] = size * counts.total
        width = min(config.max_position_embeddings, MAX_TOKENS)
        of = replace(work.scoring_pass, compute_bytes=size, stream_bytes=size, split_among=1)
        of = replace(of, rows=min(MAX_ROWS, MAX_TOKENS // width), seq_len=width)
        phases[f"score by the {name}"] = {"a pass": forward_bytes(config, of)}
    return Role(held, phases, host)


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
    if work.keeps:
        kept = kept_passes(models, layout, work)["policy"].num_bytes
        phases = _only_in(phases, {"passes kept": kept}, tuple(name for name in scoring.phases if name != REWARD))
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
