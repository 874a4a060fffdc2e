"""DPO as a stage: what it reads, what is checked before it runs, what it will take."""

import math

from dpo.config import DPOConfig
from dpo.report import REPORTER
from dpo.training import train
from lm.tokenizer import Tokenizer
from lm.weights import purpose_of
from reward.comparisons import read_judgments
from reward.prepared import PreparedRankings, check_objectives, report_overlong, report_rankings, tokenize
from reward.sizes import comparison_lengths, comparison_steps
from stages.contract import Parent, Stage
from stages.planner import Planner, StagePlan, rows_and_passes
from stages.run import JobView, StageRun


def run_dpo(run: StageRun, config: DPOConfig) -> None:
    """Train on all workers."""
    start = run.start("sft")
    tokenizer = Tokenizer.load(start, end=config.end_token)
    found = read_judgments(config.rankings)
    folder = tokenize(run, config, tokenizer, found, run.model.max_position_embeddings)
    run.on_ranks(train, config, start, PreparedRankings.of(found, config, run.seed, folder))


def check(config: DPOConfig, _job: JobView) -> None:
    """Labelers of a world judge by everything at once."""
    check_objectives(config)


def load_tokenizer(run: StageRun, config: DPOConfig) -> Tokenizer:
    """The tokenizer that the policy will have."""
    loaded = Tokenizer.load(run.start("sft"), end=config.end_token) if config.init_from else run.tokenizer_of("sft")
    return loaded.with_template(config.chat_template)


def preflight(run: StageRun, config: DPOConfig) -> None:
    """Check that the model is a language model, that every row of the rankings has its format, and that every
    conversation fits; report what is odd. Rankings that are still to be collected are not read.
    """
    if config.init_from and (purpose := purpose_of(run.start("sft"))) != "language":
        raise ValueError(f"dpo.init_from {config.init_from}: a {purpose} model; a language model was expected")
    if "collect" in run.parents:
        return
    found = read_judgments(config.rankings, run.tell)
    report_rankings(config, found, run.seed)
    most_tokens = run.model.max_position_embeddings
    folder = tokenize(run, config, load_tokenizer(run, config), found, most_tokens)
    report_overlong(run, config, folder, most_tokens)


def plan(planner: Planner, config: DPOConfig) -> StagePlan:
    steps, num_responses = comparison_steps(planner, config)
    context = planner.model.max_position_embeddings
    lengths = comparison_lengths(planner, config, lambda run: load_tokenizer(run, config), context)
    width = planner.packed_width(lengths.longest)
    rows, _ = rows_and_passes(config.batch, planner.layout.ranks, width, num_responses)
    if lengths.response_share == 1:
        planner.sizes.assume("bound: every token of a conversation is counted as one of the response")
    # Only responses have logits. A pass may be full of the conversations that have most of them.
    num_logits = math.ceil(rows * width * lengths.response_share) * planner.model.vocab_size
    return planner.training(
        "comparisons",
        config,
        steps,
        lengths.longest,
        num_logits,
        mean_tokens=lengths.mean,
        rows_per_unit=num_responses,
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
    report=REPORTER,
)
