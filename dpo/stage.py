"""DPO as a stage: training on each rank, metrics on held-out rankings, checks before a run, and its plan.

The reference's log-probs are the policy's own before the first step, so there is no second model in memory. A loss
without a reference needs them only for the report, on held-out rankings.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpo.config import DPOConfig
from dpo.losses import HeldoutLabels, LabelResults
from dpo.objective import PreferenceObjective, check_first_loss, mismatched
from dpo.policy import Floats, PolicyLearner, PolicySource, logprobs_on_all_ranks, reference_logprobs
from dpo.report import REPORTER, DPOResults, PairMeans, title_of
from files.atomic import write_json
from files.hashes import derive_seed
from files.records import record_of
from lm.adapters import adapted, save_trained
from lm.model import LanguageModel
from lm.source import on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, purpose_of
from preferences.records import Ranking
from preferences.statistics.agreement import accuracy_against
from preferences.statistics.estimates import UNKNOWN, Interval
from preferences.statistics.intervals import clustered_mean
from reward.comparisons import Comparison
from reward.metrics import labeler_metrics
from reward.objective import network_weights, starting_log_nu
from reward.prepared import (
    WARNINGS,
    PreparedRankings,
    check_objectives,
    comparison_lengths,
    comparison_steps,
    report_rankings,
    tokenize,
    weights_of_labelers,
)
from reward.report import LabelerResults
from stages.contract import Parent, Stage
from stages.plan import Planner, Training
from stages.run import JobView, StageRun
from training.engine import Engine, StageContext, build_engine
from training.loop import LoopConfig, TrainingLoop
from training.notices import say
from training.tokens import read_overlong

HELDOUT_REWARDS = "heldout_rewards.json"  # {task_id: implicit rewards of its responses, in the rankings file's order}


def run_dpo(run: StageRun, config: DPOConfig) -> None:
    """Train on all workers."""
    start = run.start("sft")
    tokenizer = Tokenizer.load(start, end=config.end_token)
    run.on_ranks(train, config, start, tokenize(run, config, tokenizer, run.model.max_position_embeddings))


def train(context: StageContext, config: DPOConfig, start: Path, data: PreparedRankings) -> None:
    """Train on this rank; rank 0 writes `model/`, `heldout_rewards.json` and `results.json`.

    Raises: ValueError unless policy and reference agree before the first step.
    """
    tokenizer = Tokenizer.load(start, end=config.end_token)
    tokenizer = tokenizer.with_template(config.chat_template)
    loss = config.preference_loss
    loss.check_data(data.split, config)
    trained_on = loss.select(data.comparisons(data.split.train, weights_of_labelers(data.split, config)), config)
    unseen = loss.select(data.comparisons(data.split.heldout), config)  # all labelers weigh the same in measurements
    log_nu = starting_log_nu(trained_on, 0) if config.ties == "davidson" else None
    policy = ModelFolder(start, LanguageModel, config.dropout)
    network = adapted(policy, config.lora, derive_seed(context.seed, "dpo", "lora"))
    engine = build_engine(context, PolicySource(network, log_nu), config)
    training, heldout, before = objectives(engine, context, config, trained_on, unseen)
    num_steps = max(1, round(config.num_epochs * len(trained_on) / config.batch.batch_size))
    loop_config = LoopConfig.of("dpo", context.seed, num_steps, config)
    loop = TrainingLoop(engine, loop_config, training, heldout, context.folder)
    if loss.has_reference:
        check_first_loss(engine, training, loop.sampler.batch(0), config.batch)
    loop.run()
    after = logprobs_on_all_ranks(engine, unseen, config.batch)
    weights, others = engine.weights_for_file(), dict[str, Tensor]()
    if engine.is_main:
        own, trained = network_weights(weights, others), engine.module.network
        save_trained(context.folder, on_meta(policy.build), trained, own, tokenizer, config.lora, start)
        learned_nu = None
        if log_nu is not None:
            learned_nu = math.exp(log_nu + trained.config.hidden_size * float(others["nu"]))
        prompts = {ranking.task_id: ranking.prompt for ranking in data.split.heldout}
        log_ratios = [now - then for now, then in zip(after, before, strict=True)]
        labels = HeldoutLabels(unseen, log_ratios, prompts, heldout.baseline.value)
        unpaired = loss.label_results(trained_on, labels, config)
        write_results(context, config, data, (trained_on, unseen), (before, after), num_steps, learned_nu, unpaired)
    engine.barrier()
    engine.close()


def objectives(
    engine: Engine[PolicyLearner],
    context: StageContext,
    config: DPOConfig,
    trained_on: Sequence[Comparison],
    unseen: Sequence[Comparison],
) -> tuple[PreferenceObjective, PreferenceObjective, Sequence[Floats]]:
    """Returns the objectives of training and of held-out rankings, and the reference's log-probs of the latter."""
    loss, others = config.preference_loss, list[list[Comparison]]()
    if loss.is_unpaired:
        room, seed = engine.module.network.config.max_position_embeddings, derive_seed(context.seed, "dpo", "others")
        others = [mismatched(part, seed, room) for part in (trained_on, unseen)]
    parts = [trained_on if loss.has_reference else [], unseen, *others]
    everything = [comparison for part in parts for comparison in part]
    flat = iter(reference_logprobs(engine, context.folder, everything, config.batch))
    of_training, before, *of_others = ([next(flat) for _ in part] for part in parts)
    training, heldout = (of_training, before) if loss.has_reference else (None, None)
    for_training, for_heldout = zip(others, of_others, strict=True) if others else ((), ())
    return (
        PreferenceObjective(trained_on, training, config, *for_training),
        PreferenceObjective(unseen, heldout, config, *for_heldout),
        before,
    )


@dataclass(frozen=True)
class Measured:
    """Log-probs of a comparison's K responses before and after training, their implicit rewards, and their lengths."""

    before: Floats
    after: Floats
    rewards: Floats
    tokens: Floats


def write_results(
    context: StageContext,
    config: DPOConfig,
    data: PreparedRankings,
    comparisons: tuple[Sequence[Comparison], Sequence[Comparison]],
    logprobs: tuple[Sequence[Floats], Sequence[Floats]],
    num_steps: int,
    learned_nu: float | None,
    unpaired: LabelResults | None,
) -> None:
    """Write the results. `comparisons` are those trained on and those held out; `logprobs` are the reference's and the
    trained policy's of those held out.
    """
    (trained_on, unseen), split = comparisons, data.split
    measured = {
        comparison.task_id: _measured(config, comparison, *values)
        for comparison, *values in zip(unseen, *logprobs, strict=True)
    }
    rewards = {task_id: comparison.rewards.tolist() for task_id, comparison in measured.items()}
    write_json(context.folder / HELDOUT_REWARDS, rewards)
    write_json(context.folder / WARNINGS, data.warnings)
    num_pairs, num_equal = count_pairs(trained_on)
    if num_equal and unpaired is None:
        say(f"dpo: in {num_equal:,} of {num_pairs:,} pairs the responses are equal; DPO learns nothing from these")
    rankings = [ranking for ranking in split.heldout if ranking.task_id in measured]  # KTO leaves out unlabelled ones
    margin, pairs = margin_and_means(rankings, measured)
    weights = {name: weight for (_, name), weight in weights_of_labelers(split, config).items()}
    labelers = labeler_metrics(split.train, weights)
    context.write_results(
        DPOResults(
            loss=config.loss,
            beta=config.beta,
            num_steps=num_steps,
            train_comparisons=len(trained_on),
            train_rankings=sum(len(comparison.verdicts) for comparison in trained_on),
            heldout_comparisons=len(unseen),
            heldout_accuracy=accuracy_against(rankings, rewards),
            margin=margin,
            pairs=pairs,
            length_correlation=length_correlation(list(measured.values())),
            num_pairs=num_pairs,
            num_equal_pairs=num_equal,
            learned_nu=learned_nu,
            unpaired=unpaired,
            labelers={name: record_of(result, LabelerResults, name) for name, result in labelers.items()},
            overlong=read_overlong(data.folder) or None,
            sources=data.sources,
        )
    )


def _measured(config: DPOConfig, comparison: Comparison, before: Floats, after: Floats) -> Measured:
    tokens, loss = np.array(comparison.response_tokens, dtype=np.float32), config.preference_loss
    ratios, lengths = torch.from_numpy(after - before if loss.has_reference else after), torch.from_numpy(tokens)
    return Measured(before, after, loss.implicit_rewards(ratios, lengths, config.beta).numpy(), tokens)


def margin_and_means(
    rankings: Sequence[Ranking], measured: Mapping[str, Measured]
) -> tuple[Interval, PairMeans | None]:
    """Returns the mean margin over all untied pairs, with an interval over prompts; and the means of both sides."""
    sides: list[tuple[Floats, Floats]] = []
    prompts: list[int] = []
    numbers: dict[object, int] = {}
    for ranking in rankings:
        values = measured[ranking.task_id]
        values_4K = np.stack([values.rewards, values.before, values.after, values.tokens])
        for i, j in itertools.permutations(range(len(ranking.ranks)), 2):
            if ranking.ranks[i] < ranking.ranks[j]:
                sides.append((values_4K[:, i], values_4K[:, j]))
                prompts.append(numbers.setdefault(ranking.prompt, len(numbers)))
    if not sides:
        return UNKNOWN, None
    better_P4, worse_P4 = (np.stack(side).astype(np.float64) for side in zip(*sides, strict=True))
    margin = clustered_mean(better_P4[:, 0] - worse_P4[:, 0], np.array(prompts))
    (_, *chosen), (_, *rejected) = better_P4.mean(axis=0).tolist(), worse_P4.mean(axis=0).tolist()
    return margin, PairMeans(chosen[0], chosen[1], rejected[0], rejected[1], chosen[2], rejected[2])


def length_correlation(measured: Sequence[Measured]) -> float | None:
    """Returns Pearson's correlation of implicit rewards and lengths, after subtracting each comparison's means; None if
    either does not vary.
    """
    rewards_N = np.concatenate([m.rewards - m.rewards.mean() for m in measured]).astype(np.float64)
    tokens_N = np.concatenate([m.tokens - m.tokens.mean() for m in measured]).astype(np.float64)
    scale = float(np.sqrt((rewards_N**2).sum() * (tokens_N**2).sum()))
    return float((rewards_N * tokens_N).sum()) / scale if scale > 0 else None


def count_pairs(comparisons: Sequence[Comparison]) -> tuple[int, int]:
    """Count the pairs of responses, and those of two equal responses, whose difference has no gradient."""
    num_pairs = equal = 0
    for comparison in comparisons:
        texts = [bytes(np.asarray(tokens, dtype=np.int32)) for tokens in comparison.sequences]
        pairs = [one == other for one, other in itertools.combinations(texts, 2)]
        num_pairs, equal = num_pairs + len(pairs), equal + sum(pairs)
    return num_pairs, equal


def check(config: DPOConfig, _job: JobView) -> None:
    """Check the named objectives: a world's labelers give only one overall judgment."""
    check_objectives(config)


def load_tokenizer(run: StageRun, config: DPOConfig) -> Tokenizer:
    """Returns the tokenizer that the trained policy will have."""
    return run.tokenizer_of("sft", config.end_token).with_template(config.chat_template)


def preflight(run: StageRun, config: DPOConfig) -> None:
    """Check that the model is a language model, that every row of the rankings has its format, and that every
    conversation fits; report unusual rows. Rankings that have yet to be collected are not read.
    """
    if config.init_from and (purpose := purpose_of(run.start("sft"))) != "language":
        raise ValueError(f"dpo.init_from {config.init_from}: a {purpose} model; a language model was expected")
    if "collect" in run.parents:
        return
    most_tokens = run.model.max_position_embeddings
    prepared = tokenize(run, config, load_tokenizer(run, config), most_tokens, run.tell)
    for warning in config.preference_loss.check_data(prepared.split, config):
        run.tell(f"dpo: {warning}")
    report_rankings(run, config, prepared, most_tokens)


def plan(planner: Planner, config: DPOConfig) -> Training:
    steps, num_responses = comparison_steps(planner, config)
    context = planner.model.max_position_embeddings
    lengths = comparison_lengths(planner, config, lambda run: load_tokenizer(run, config), context)
    if lengths.response_share == 1:
        planner.sizes.assume("upper bound: counts every token of a conversation as a response token")
    read_first, mean = 0.0, round(lengths.mean) or lengths.longest
    if config.preference_loss.has_reference:
        planner.sizes.assume(
            "its time includes one pass of the reference through all comparisons, before the first step"
        )
        trained_on = steps * config.batch.batch_size / config.num_epochs
        read_first = trained_on / (1 - config.heldout_share) * num_responses * mean
    return Training(
        "comparisons",
        config,
        planner.model,
        steps,
        lengths,
        rows_per_unit=num_responses,
        read_first=read_first,
        # Each prompt with a response to another one.
        read_tokens=config.batch.batch_size * mean if config.preference_loss.is_unpaired else 0.0,
    )


STAGE = Stage(
    name="dpo",
    config=DPOConfig,
    run=run_dpo,
    parents=(Parent("sft", substitutes=("init_from",)),),
    policy_from="sft",
    tokenizer=load_tokenizer,
    check=check,
    preflight=preflight,
    plan=plan,
    title=lambda config: title_of(config.loss),
    report=REPORTER,
)
