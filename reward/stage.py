"""The reward model as a stage: what it reads, what is checked before it runs, what it will take."""

from functools import partial
from pathlib import Path

from lm.source import on_meta
from lm.tokenizer import Tokenizer
from preferences.formats.merging import Found
from preferences.records import OVERALL
from reward.comparisons import RankingsConfig, read_judgments
from reward.config import RewardConfig
from reward.prepared import PreparedRankings, ranking_parts, split_of
from reward.report import REPORTER
from reward.training import WARNINGS, network_source, train
from reward.world_measures import measure_reward_model
from stages.contract import Parent, Stage
from stages.planner import Planner, StagePlan
from stages.progress import console
from stages.run import JobView, StageRun
from stages.tokens import token_folder
from training.tokens import SEQUENCES

COLLECTED = "collect:rankings"  # the source that names what labelers gave
FIRST_ROWS = 100  # of a rankings file, to see how many responses its tasks have


def run_reward(run: StageRun, config: RewardConfig) -> None:
    """Train on all workers; measure against the world, where its labelers gave the rankings."""
    start = run.start("sft")
    tokenizer = Tokenizer.load(start, end=config.end_token, pad=config.pad_token)
    found = read_judgments(config.rankings)
    folder = tokenize(run, config, tokenizer, found, _most_tokens(start, config))
    run.on_ranks(train, config, start, PreparedRankings.of(found, config, run.seed, folder))
    if "collect" in run.parents:  # so the world knows what its labelers went by
        run.write_results(measure_reward_model(run, config))


def check(config: RewardConfig, _job: JobView) -> None:
    """Labelers of a world judge by everything at once."""
    if config.rankings.source == COLLECTED and not set(config.objectives) <= {OVERALL}:
        raise ValueError(
            f"reward.objectives is {list(config.objectives)}, and the labelers of [collect] judge by {OVERALL!r} alone;"
            " rankings of those objectives were expected"
        )


def preflight(run: StageRun, config: RewardConfig) -> None:
    """Check that every row of the rankings has its format, that each objective has some, and that every conversation
    fits the model; report what is odd, and what is not learned. Rankings that are still to be collected are not read.
    """
    if "collect" in run.parents:
        return
    found = read_judgments(config.rankings)
    objectives = split_of(found.rankings, config, run.seed).objectives
    left_out = sum(ranking.objective not in objectives for ranking in found.rankings)
    if left_out:
        console.print(f"{config.rankings.source}: {left_out:,} rankings are of objectives that are not learned")
    counts = ", ".join(f"{count:,} x {kind}" for kind, count in found.report.counts().items())
    if counts:
        console.print(f"{config.rankings.source}: warnings, told in reward/{WARNINGS}: {counts}", markup=False)
    if config.init_from:
        start = run.start("sft")
        tokenizer = Tokenizer.load(start, end=config.end_token, pad=config.pad_token)
        most_tokens = _most_tokens(start, config)
    else:
        tokenizer, most_tokens = run.tokenizer_of("sft"), run.model.max_position_embeddings
    tokenize(run, config, tokenizer, found, most_tokens)


def _most_tokens(start: Path, config: RewardConfig) -> int:
    """The context of the reward model that starts from a directory."""
    return on_meta(network_source(start, 0.0, seed=0, labels=config.labels).build).config.max_position_embeddings


def tokenize(run: StageRun, config: RewardConfig, tokenizer: Tokenizer, found: Found, max_tokens: int) -> Path:
    """The folder with the rankings' tokens, which are written unless they are there. Raises: as `encode_tasks`."""
    templated = tokenizer.with_template(config.chat_template)
    parts = partial(ranking_parts, templated, found, max_tokens)
    return token_folder(run, "rankings", templated, (config.rankings,), SEQUENCES, parts, max_tokens=max_tokens)


def plan(planner: Planner, config: RewardConfig) -> StagePlan:
    sizes = planner.sizes
    num_tasks, num_responses = _num_tasks(planner, config.rankings), _responses_per_task(planner, config.rankings)
    steps = max(1, round(config.num_epochs * num_tasks * (1 - config.heldout_share) / config.batch.batch_size))
    sizes.assume("one ranking per task; rankings of one task are one comparison")
    return planner.training(
        "comparisons",
        config,
        steps,
        sizes.conversation_tokens(),
        0,
        rows_per_unit=num_responses,
        num_scores=len(config.labels),
        init_from=config.init_from,
    )


def _num_tasks(planner: Planner, rankings: RankingsConfig) -> int:
    """Tasks of a file that is here: a row may hold several, and several rows one."""
    if Path(rankings.source).exists():
        return len(read_judgments(rankings).tasks)
    return planner.sizes.num_rows(rankings)


def _responses_per_task(planner: Planner, rankings: RankingsConfig) -> int:
    written = planner.sizes.stage_size(rankings.source)
    if written is not None:
        return written.responses_per_row
    if Path(rankings.source).exists():
        first = read_judgments(rankings.model_copy(update={"max_rows": FIRST_ROWS}))
        return max(len(task.responses) for task in first.tasks.values())
    planner.sizes.assume("two responses per task")
    return 2


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
