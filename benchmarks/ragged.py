"""Packed rows against padded ones, in one process by turns: `python -m benchmarks.ragged [ROUNDS] [--bf16]`.

It times a PPO update of policy and value function, PPO's passes without gradients, and a step of the reward model, over
sequences of log-normal length and of equal length. Padded means one sequence per row, micro-batches in the order of the
batch, each as wide as its longest sequence. Packed is what the stages do, in passes with room for equally many of the
longest sequences. Weights are random; seconds are the CPU's, on one thread.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from lm.attention import grouped_mask
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights, one_per_row
from lm.source import RandomInit
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.algorithm import GAE
from ppo.config import PPOConfig
from ppo.learner import Learner
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from ppo.rollout import PolicyBatch, Rollout, ValueBatch
from reward.comparisons import Comparison, Verdict
from reward.objective import AuxiliaryParameters, LearnerSource, RankingObjective, RewardLearner
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig
from training.engine import Engine, LossAndMetrics
from training.packing import IntArray, PackedRows, packed_rows, pass_tokens, split_passes
from training.tokens import Sequences

SHAPE = ModelConfig(
    vocab_size=512,
    max_position_embeddings=512,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
)
BATCH = BatchConfig(batch_size=32, micro_batch_size=8)
PROMPT_TOKENS, MOST_RESPONSE_TOKENS = 16, 496
MEAN_TOKENS, SIGMA = 100, 0.8  # of responses; σ of the logarithm
OPTIMIZER = OptimizerConfig(learning_rate=1e-5, schedule="constant")
Work = Callable[[], object]


def response_lengths(*, ragged: bool) -> NDArray[np.int64]:
    """Draws the number of tokens of each response."""
    if not ragged:
        return np.full(BATCH.batch_size, MEAN_TOKENS)
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, BATCH.batch_size)
    return np.clip(drawn.astype(np.int64), 2, MOST_RESPONSE_TOKENS)


def padded_rows(sequences: Sequences, _device: torch.device) -> PackedRows:
    """Returns one sequence per row, padded to the longest."""
    lengths = sequences.lengths
    real = np.arange(lengths.max()) < lengths[:, None]
    tokens, counted = np.zeros(real.shape, dtype=np.int64), np.zeros(real.shape, dtype=np.bool_)
    tokens[real], counted[real] = sequences.tokens, sequences.counted
    return PackedRows(tokens, real.astype(np.int64), counted, np.arange(len(lengths))[:, None])


def in_order(units: Sequence[Sequence[int]], _num_ranks: int, _max_tokens: int) -> list[list[list[int]]]:
    """Returns micro-batches in the order of the batch."""
    places, size = list(range(len(units))), BATCH.micro_batch_size
    return [[places[start : start + size] for start in range(0, len(units), size)]]


@contextmanager
def padding() -> Iterator[None]:
    """Makes the stages pad while the block runs."""
    with (
        mock.patch("ppo.rank.packed_rows", padded_rows),
        mock.patch("reward.scoring.packed_rows", padded_rows),
        mock.patch("ppo.rollout.split_passes", in_order),
        mock.patch("ppo.scorer.split_passes", in_order),
        mock.patch("reward.objective.split_passes", in_order),
    ):
        yield


def ppo_work(roles: Roles, lengths: NDArray[np.int64]) -> dict[str, Work]:
    """Returns an update of both models, and the passes without gradients, over the same responses."""
    generator = np.random.default_rng(1)
    prompts = generator.integers(8, SHAPE.vocab_size, (len(lengths), PROMPT_TOKENS)).tolist()
    responses = [generator.integers(8, SHAPE.vocab_size, length).tolist() for length in lengths]
    n, zeros = len(lengths), [[0.0] * length for length in lengths]
    rollout = Rollout.of(range(n), prompts, responses, [True] * n, zeros, max_new_tokens=MOST_RESPONSE_TOKENS, pad_id=0)
    mask_BR, whole = rollout.response_mask_BR, [torch.arange(n)]
    table_BR, num_tokens = torch.zeros(mask_BR.shape), int(mask_BR.sum())
    policy = PolicyBatch(rollout, table_BR - 7, table_BR + 1, mask_BR, num_tokens, torch.empty(0, dtype=torch.int64), 0)
    value = ValueBatch(rollout, table_BR, table_BR + 1, mask_BR, num_tokens)
    learners, scorers = roles.learners, roles.scorers
    return {
        "PPO: update of the policy": lambda: learners.update(Learner.update_policy, policy, 1e-5, 0),
        "PPO: update of the value function": lambda: learners.update(Learner.update_value, value, 1e-5, 0),
        "PPO: log-probs": lambda: learners.start_policy_logprobs(rollout, whole)(),
        "PPO: scores": lambda: scorers.start_scores(rollout)(),
    }


def reward_work(engine: Engine[RewardLearner], lengths: NDArray[np.int64]) -> Work:
    """Returns a step of the reward model over pairs of responses."""
    generator = np.random.default_rng(2)
    sequences = [generator.integers(8, SHAPE.vocab_size, PROMPT_TOKENS + length).tolist() for length in lengths]
    pairs = zip(sequences[::2], sequences[1::2], strict=True)
    objective = RankingObjective(
        [Comparison(str(n), pair, (Verdict((1, 2)),)) for n, pair in enumerate(pairs)], "decoder"
    )
    batch = BatchConfig(batch_size=len(objective), micro_batch_size=BATCH.micro_batch_size // 2)
    rows = np.arange(len(objective))

    def loss(mine: IntArray) -> LossAndMetrics:
        total, metrics = objective.loss(engine.model, mine, engine.device)
        return total / len(rows), metrics

    def step() -> None:
        (passes,) = objective.rank_passes(rows, batch, 1, with_gradients=True)
        engine.accumulate(passes, loss)
        engine.step()

    return step


def ratios(work: Mapping[str, Work], rounds: int) -> dict[str, tuple[float, float]]:
    """Returns the least CPU seconds of each work, padded and packed. Every round after the first, a warm-up, measures
    both. The least counts because other load on the machine only adds time.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, run in work.items():
            with padding():
                padded = _cpu_seconds(run)
            packed = _cpu_seconds(run)
            if number:
                seconds[name].append((padded, packed))
    return {name: (min(a for a, _ in pairs), min(b for _, b in pairs)) for name, pairs in seconds.items()}


def _cpu_seconds(run: Work) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


def main() -> None:
    torch.set_num_threads(1)
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    engine_config = EngineConfig(precision="bf16" if "--bf16" in sys.argv else "fp32", trackers=())
    config = PPOConfig(
        prompts=DataConfig(source="unread"), num_iterations=1, rollout_batch_size=BATCH.batch_size, minibatch=BATCH,
        max_new_tokens=MOST_RESPONSE_TOKENS, policy_optimizer=OPTIMIZER, advantage=GAE(value_optimizer=OPTIMIZER),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        roles = Roles.in_process(config, engine_config, make_parents(Path(folder)))
    source = LearnerSource(RandomInit(lambda: ScalarModel(SHAPE), 3), AuxiliaryParameters())
    engine: Engine[RewardLearner] = Engine(source, OPTIMIZER, engine_config, world_size=1, micro_batch=1)
    for ragged in (True, False):
        lengths = response_lengths(ragged=ragged)
        print(f"{'log-normal' if ragged else 'equal'} lengths, {(lengths + PROMPT_TOKENS).sum():,} tokens", flush=True)
        both = padded_work(lengths + PROMPT_TOKENS), packed_work(lengths + PROMPT_TOKENS)
        for name, before, after in zip(("tokens read", "scores per head"), *both, strict=True):
            print(f"  {name}: padded {before:,}, packed {after:,}: {before / after:.2f}")
        work = {**ppo_work(roles, lengths), "reward model: step": reward_work(engine, lengths)}
        for name, (padded, packed) in ratios(work, numbers[0] if numbers else 5).items():
            print(f"  {name}: padded {padded:.2f} s, packed {packed:.2f} s: {padded / packed:.2f}", flush=True)


def padded_work(lengths: NDArray[np.int64]) -> tuple[int, int]:
    """Counts tokens that are read, including padding, and attention scores per head, for micro-batches in order."""
    widths = lengths.reshape(-1, BATCH.micro_batch_size).max(axis=1)
    return BATCH.micro_batch_size * int(widths.sum()), BATCH.micro_batch_size * int((widths**2).sum())


def packed_work(lengths: NDArray[np.int64]) -> tuple[int, int]:
    """Counts the same for rows that are packed as the stages do on a CPU."""
    units = [[length] for length in lengths.tolist()]
    tokens = scores = 0
    for places in split_passes(units, 1, pass_tokens(BATCH, units, with_gradients=True))[0]:
        sequences = Sequences.of(([1] * units[place][0], [True] * units[place][0]) for place in places)
        segments_BT = torch.from_numpy(packed_rows(sequences, torch.device("cpu")).segments)
        B, T = segments_BT.shape
        groups = grouped_mask(segments_BT, causal=True).groups
        tokens += B * T
        scores += B * T**2 if one_per_row(segments_BT) else sum(g.num_sequences * g.longest**2 for g in groups)
    return tokens, scores


def make_parents(folder: Path) -> InitialModels:
    """Writes a policy and a reward model with random weights."""
    tokenizer = Tokenizer.train(["one red bird saw the cat on the mat"] * 9, SHAPE.vocab_size, "chat")
    for name, model in (("sft", LanguageModel(SHAPE)), ("reward", ScalarModel(SHAPE))):
        init_weights(model, 0)
        save_model(folder / name, model, model.state_dict(), tokenizer)
    return InitialModels(folder / "sft", folder / "reward", ScoreScale(0.0, 1.0), None)


if __name__ == "__main__":
    main()
