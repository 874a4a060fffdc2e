"""Training by direct preference optimisation, on this rank.

The policy's own log-probabilities before the first step are the reference's, so no second model is in memory.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpo.config import DPOConfig
from dpo.learner import PolicyLearner, PolicySource
from dpo.loss import implicit_rewards
from dpo.measures import Measured, count_pairs, length_correlation, margin_and_means
from dpo.objective import Floats, PreferenceObjective
from dpo.reference import check_first_loss, logprobs_on_all_ranks, reference_logprobs
from dpo.results import DPOResults
from files.atomic import write_json
from files.records import record_of
from lm.adapters import save_trained
from lm.lora import adapted
from lm.model import LanguageModel
from lm.source import on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder
from preferences.statistics.agreement import accuracy_against
from reward.comparisons import Comparison
from reward.learner import network_weights, starting_log_nu
from reward.metrics import labeler_metrics
from reward.prepared import WARNINGS, PreparedRankings, weights_of_labelers
from reward.results import LabelerResults
from training.engine import Engine, StageContext, build_engine
from training.loop import LoopConfig, TrainingLoop
from training.notices import say
from training.seeds import derive_seed
from training.tokens import read_overlong

HELDOUT_REWARDS = "heldout_rewards.json"  # {task_id: implicit rewards of its responses, in the rankings file's order}


def train(context: StageContext, config: DPOConfig, start: Path, data: PreparedRankings) -> None:
    """Train on this rank; rank 0 writes `model/`, `heldout_rewards.json` and `results.json`.

    Raises: ValueError unless policy and reference agree before the first step.
    """
    tokenizer = Tokenizer.load(start, end=config.end_token)
    tokenizer = tokenizer.with_template(config.chat_template)
    trained_on = data.comparisons(data.split.train, weights_of_labelers(data.split, config))
    unseen = data.comparisons(data.split.heldout)  # all labelers weigh the same in measurements
    log_nu = starting_log_nu(trained_on, 0) if config.ties == "davidson" else None
    policy = ModelFolder(start, LanguageModel, config.dropout)
    network = adapted(policy, config.lora, derive_seed(context.seed, "dpo", "lora"))
    engine = build_engine(context, PolicySource(network, log_nu), config)
    reference = reference_logprobs(engine, context.folder, [*trained_on, *unseen], config.batch)
    before = reference[len(trained_on) :]
    training = PreferenceObjective(trained_on, reference[: len(trained_on)], config)
    num_steps = max(1, round(config.num_epochs * len(trained_on) / config.batch.batch_size))
    loop_config = LoopConfig.of("dpo", context.seed, num_steps, config)
    loop = TrainingLoop(engine, loop_config, training, PreferenceObjective(unseen, before, config), context.folder)
    check_first_loss(engine, training, loop.sampler.batch(0), config.batch)
    loop.run()
    after = logprobs_on_all_ranks(engine, unseen, config.batch)
    weights, others = engine.weights_for_file(), dict[str, Tensor]()
    if engine.is_main:
        own, trained = network_weights(weights, others), engine.module.network
        save_trained(context.folder, on_meta(policy.build), trained, own, tokenizer, config.lora, start)
        learned_nu = None if log_nu is None else _learned_nu(engine, log_nu, others)
        write_results(context, config, data, (trained_on, unseen), (before, after), num_steps, learned_nu)
    engine.barrier()
    engine.close()


def _learned_nu(engine: Engine[PolicyLearner], log_nu: float, others: dict[str, Tensor]) -> float:
    return math.exp(log_nu + engine.module.network.config.hidden_size * float(others["nu"]))


def write_results(
    context: StageContext,
    config: DPOConfig,
    data: PreparedRankings,
    comparisons: tuple[Sequence[Comparison], Sequence[Comparison]],
    logprobs: tuple[Sequence[Floats], Sequence[Floats]],
    num_steps: int,
    learned_nu: float | None,
) -> None:
    """Write what was learned: `comparisons` are those trained on and those held out; `logprobs`, of the held-out ones,
    the reference's and the trained policy's.
    """
    (trained_on, unseen), split = comparisons, data.split
    measured = {
        comparison.task_id: _measured(config, comparison, *values)
        for comparison, *values in zip(unseen, *logprobs, strict=True)
    }
    rewards = {task_id: of.rewards.tolist() for task_id, of in measured.items()}
    write_json(context.folder / HELDOUT_REWARDS, rewards)
    write_json(context.folder / WARNINGS, list(data.warnings))
    num_pairs, num_equal = count_pairs(trained_on)
    if num_equal:
        say(f"dpo: {num_equal:,} of {num_pairs:,} pairs are of equal responses, from which nothing is learned")
    margin, pairs = margin_and_means(split.heldout, measured)
    weights = {name: weight for (_, name), weight in weights_of_labelers(split, config).items()}
    labelers = labeler_metrics(split.train, weights)
    context.write_results(
        DPOResults(
            loss=config.loss,
            beta=config.beta,
            num_steps=num_steps,
            train_comparisons=len(trained_on),
            train_rankings=len(split.train),
            heldout_comparisons=len(unseen),
            heldout_accuracy=accuracy_against(split.heldout, rewards),
            margin=margin,
            pairs=pairs,
            length_correlation=length_correlation(list(measured.values())),
            num_pairs=num_pairs,
            num_equal_pairs=num_equal,
            learned_nu=learned_nu,
            labelers={name: record_of(of, LabelerResults, name) for name, of in labelers.items()},
            overlong=read_overlong(data.folder) or None,
            sources=data.sources,
        )
    )


def _measured(config: DPOConfig, comparison: Comparison, before: Floats, after: Floats) -> Measured:
    tokens = np.array(comparison.response_tokens, dtype=np.float32)
    ratios, lengths = torch.from_numpy(after - before), torch.from_numpy(tokens)
    return Measured(before, after, implicit_rewards(config.loss, ratios, lengths, config.beta).numpy(), tokens)
