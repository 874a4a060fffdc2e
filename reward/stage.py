"""The reward model as a stage: what it reads, what is checked before it runs, what it will take."""

from pathlib import Path

from lm.source import on_meta
from lm.tokenizer import Tokenizer
from reward.calibration import calibration_sequences
from reward.comparisons import read_judgments
from reward.config import RewardConfig
from reward.prepared import PreparedRankings, check_objectives, report_overlong, report_rankings, tokenize
from reward.report import REPORTER
from reward.sizes import comparison_lengths, comparison_steps
from reward.training import network_source, train
from reward.world_measures import measure_reward_model
from stages.contract import Parent, Stage
from stages.planner import Planner, StagePlan
from stages.run import JobView, StageRun


def run_reward(run: StageRun, config: RewardConfig) -> None:
    """Train on all workers; measure against the world, where its labelers gave the rankings."""
    start = run.start("sft")
    tokenizer = Tokenizer.load(start, end=config.end_token)
    found = read_judgments(config.rankings)
    folder = tokenize(run, config, tokenizer, found, _most_tokens(start, config))
    run.on_ranks(train, config, start, PreparedRankings.of(found, config, run.seed, folder))
    if "collect" in run.parents:  # so the world knows what its labelers went by
        run.write_results(measure_reward_model(run, config))


def check(config: RewardConfig, _job: JobView) -> None:
    """Labelers of a world judge by everything at once."""
    check_objectives(config)


def preflight(run: StageRun, config: RewardConfig) -> None:
    """Check that every row of the rankings has its format, that each objective has some, and that every conversation
    fits the model; report what is odd, and what is not learned. Rankings that are still to be collected are not read.
    """
    if "collect" in run.parents:
        return
    found = read_judgments(config.rankings, run.tell)
    report_rankings(config, found, run.seed)
    tokenizer, most_tokens = load_tokenizer(run, config), run.model.max_position_embeddings
    if config.init_from:
        most_tokens = _most_tokens(run.start("sft"), config)
    report_overlong(run, config, tokenize(run, config, tokenizer, found, most_tokens), most_tokens)
    calibration_sequences(config, tokenizer.with_template(config.chat_template), most_tokens)


def load_tokenizer(run: StageRun, config: RewardConfig) -> Tokenizer:
    """The tokenizer of the model that the stage starts from."""
    if config.init_from:
        return Tokenizer.load(run.start("sft"), end=config.end_token)
    return run.tokenizer_of("sft")


def _most_tokens(start: Path, config: RewardConfig) -> int:
    """The context of the reward model that starts from a directory."""
    return on_meta(network_source(start, 0.0, seed=0, labels=config.labels).build).config.max_position_embeddings


def plan(planner: Planner, config: RewardConfig) -> StagePlan:
    steps, num_responses = comparison_steps(planner, config)
    context = planner.shape(config.init_from).max_position_embeddings
    lengths = comparison_lengths(planner, config, lambda run: load_tokenizer(run, config), context)
    return planner.training(
        "comparisons",
        config,
        steps,
        lengths.longest,
        0,
        mean_tokens=lengths.mean,
        rows_per_unit=num_responses,
        num_scores=len(config.labels),
        init_from=config.init_from,
    )


STAGE = Stage(
    name="reward",
    config=RewardConfig,
    run=run_reward,
    # A reward model may well have another body than the policy.
    parents=(Parent("sft", substitutes=("init_from",), own_shape=True),),
    check=check,
    preflight=preflight,
    plan=plan,
    report=REPORTER,
)
