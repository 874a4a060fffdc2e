"""How much better a round's policy is than the one before: both answer held-out prompts, and the judge of [compare]
scores them. The difference is paired over prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from evaluation.compare.folder import CompareConfig
from evaluation.compare.judges import reward_judge
from evaluation.compare.sampled import MAX_FAILED_SHARE
from evaluation.compare.stage import judge_of, start_of
from evaluation.inputs import with_clusters
from evaluation.judges.judge import Pair, ScoreJudge, pairs_of, refuse_too_many_failures
from evaluation.judges.people import PeopleJudge
from evaluation.policies import response_of
from evaluation.verdicts import Response, Verdict
from files.atomic import write_jsonl
from files.hashes import derive_seed
from files.records import as_json, read_record, record_of
from heed.loop.collect import LabelsWaitError, RoundResults, waiting_for_store
from heed.loop.config import GAIN, name_of_round
from ppo.stage import STAGE as PPO
from preferences.statistics.estimates import Floats, Interval, Ints
from preferences.statistics.intervals import clustered_mean
from reward.sampling import Sample, SamplingSpec, sample_everywhere
from stages.data import fitting_prompts
from stages.plan import Planner, Sampling
from stages.run import StageRun
from training.data import Prompt
from training.metrics import read_metrics

RESPONSES = "responses.jsonl"  # of the round's policy; the next round's gain reads them
HUNDRED = 100


@dataclass(frozen=True)
class GainResults:
    """Results of a round's comparison. `gain` is the judge's score of `policy` minus that of `before`, or if the judge
    gives no scores (people), the share of comparisons that `policy` wins minus ½; its interval is over prompts.

    `per_hundred` is the gain divided by the hundreds of labels that have come since the round before. `score` is the
    policy's mean score, NaN if the judge gives none; `before_score` that of `before`. `kl_nats` is the policy's KL from
    the model that the first round started from, per response.
    """

    round: int
    policy: str
    before: str
    judge: str
    unit: str
    num_prompts: int
    num_new_labels: int
    gain: Interval
    per_hundred: Interval
    score: Interval
    before_score: Interval
    kl_nats: Interval


def run_gain(run: StageRun, config: CompareConfig) -> None:
    """Compare the round's policy with the one before it, and measure its KL.

    Raises: LabelsWaitError while people, as judges, have not compared enough of the responses.
    """
    start = start_of(run)
    fitting = fitting_prompts(run, start.tokenizer, config.prompts, config.max_new_tokens, config.on_overlong)
    prompts = with_clusters(fitting.prompts, config.prompts, config.cluster_by)
    config = config.sized(len(prompts))
    number, policy = run.job.stage(run.name).round, run.own("policy")
    before = run.own("before")
    if number == 1:
        previous = _samples(run, config, prompts, before, start.model(), reference="")
    else:
        path = run.run_folder / name_of_round(GAIN, number - 1) / RESPONSES
        previous = [record_of(line, Sample, str(path)) for line in read_metrics(path)]
    model = run.run_folder / policy / "model"
    samples = _samples(run, config, prompts, policy, model, reference=str(start.model()))
    responses = {
        before: [response_of(before, sample) for sample in previous],
        policy: [response_of(policy, sample) for sample in samples],
    }
    verdicts, judge, unit = _judge(run, config, prompts, responses)
    collected = record_of_round(run.run_folder, number)
    gain, score, before_score = gain_of(prompts, verdicts, policy)
    hundreds = max(collected.num_new_labels, 1) / HUNDRED
    clusters = {prompt.prompt_id: prompt.cluster or prompt.prompt_id for prompt in prompts}
    kl = _mean([sample.log_ratio for sample in samples], [clusters[sample.prompt_id] for sample in samples])
    write_jsonl(run.folder / RESPONSES, [as_json(sample) for sample in samples])
    run.write_results(
        GainResults(
            round=number,
            policy=policy,
            before=before,
            judge=judge,
            unit=unit,
            num_prompts=len(prompts),
            num_new_labels=collected.num_new_labels,
            gain=gain,
            per_hundred=Interval(gain.mean / hundreds, gain.low / hundreds, gain.high / hundreds),
            score=score,
            before_score=before_score,
            kl_nats=kl,
        )
    )


def record_of_round(run_folder: Path, number: int) -> RoundResults:
    """Returns what a round's collecting found."""
    return read_record(run_folder / name_of_round("collect", number) / "results.json", RoundResults)


def _samples(
    run: StageRun, config: CompareConfig, prompts: Sequence[Prompt], name: str, policy: Path, *, reference: str
) -> list[Sample]:
    spec = SamplingSpec(
        policy=policy,
        num_samples=config.num_samples,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=derive_seed(run.job.seed, GAIN, name),
        precision=run.engine.resolved_precision(),
        reference=reference,
        chat_template=start_of(run).chat_template,
    )
    return sample_everywhere(run, name, spec, prompts)


def _judge(
    run: StageRun, config: CompareConfig, prompts: Sequence[Prompt], responses: dict[str, list[Response]]
) -> tuple[list[Verdict], str, str]:
    """Returns the verdicts on the i-th response of one policy and the i-th of the other, the judge, and the unit."""
    judge = round_judge(run, config)
    pairs = pairs_of(prompts, responses)
    run.enter("judging")
    if isinstance(judge, PeopleJudge):
        with waiting_for_store(run, judge.store_url):
            verdicts = _judge_by_people(run, judge, pairs, config.judged_share)
        return [one for one in verdicts if not one.failure], "people", "share of comparisons won, minus one half"
    verdicts = judge.judge(pairs, lambda done, total: run.show(done, total, "judged"))
    refuse_too_many_failures(verdicts, MAX_FAILED_SHARE)
    return [one for one in verdicts if not one.failure], judge.name, f"score by {judge.name}"


def _judge_by_people(run: StageRun, judge: PeopleJudge, pairs: Sequence[Pair], judged_share: float) -> list[Verdict]:
    """Returns people's verdicts. Raises: LabelsWaitError while too few tasks are judged."""
    count_missing = partial(_num_unjudged, judge, pairs, judged_share)
    if count_missing():
        raise LabelsWaitError(
            f"{run.name} waits for people, who compare the policies: tasks of batch {judge.batch!r} in"
            f" {judge.spec.removeprefix('people:')} need {judge.num_labelers} judgments each",
            count_missing,
        )
    return judge.judge(pairs, lambda done, total: run.show(done, total, "judged"))


def _num_unjudged(judge: PeopleJudge, pairs: Sequence[Pair], judged_share: float) -> int:
    """Returns how many tasks of a comparison by people still need judgments; it adds those that are missing."""
    found = judge.put_tasks(pairs)
    return max(0, math.ceil(judged_share * found.num_tasks) - (found.num_tasks - found.num_open))


def round_judge(run: StageRun, config: CompareConfig) -> ScoreJudge | PeopleJudge:
    """Open the judge of [compare]; with `judge_reward`, the reward model of this round scores both policies."""
    ppo, reward = run.job.section(PPO), name_of_round("reward", run.job.stage(run.name).round)
    is_own = reward in run.parents and (ppo is None or ppo.external_reward is None)
    if not config.judge_reward or not is_own:  # such as a model that ppo.reward names
        return judge_of(run, config)
    model = run.run_folder / reward / "model"
    return reward_judge("reward", model, {} if ppo is None else ppo.reward.objective_weights)


def gain_of(prompts: Sequence[Prompt], verdicts: Sequence[Verdict], policy: str) -> tuple[Interval, Interval, Interval]:
    """Returns the gain of `policy`, its mean score, and the mean score of the other policy. Without scores, a verdict
    counts as its preference for `policy`, from 0 to 1, minus ½.
    """
    clusters = {prompt.prompt_id: prompt.cluster or prompt.prompt_id for prompt in prompts}
    places = [clusters[verdict.prompt_id] for verdict in verdicts]
    signs = [1 if verdict.policy_a == policy else -1 for verdict in verdicts]
    ours = [verdict.score_a if sign > 0 else verdict.score_b for verdict, sign in zip(verdicts, signs, strict=True)]
    theirs = [verdict.score_b if sign > 0 else verdict.score_a for verdict, sign in zip(verdicts, signs, strict=True)]
    differences = [
        our - their if math.isfinite(our - their) else sign * (verdict.preference_a - 0.5)
        for our, their, sign, verdict in zip(ours, theirs, signs, verdicts, strict=True)
    ]
    return _mean(differences, places), _mean(ours, places), _mean(theirs, places)


def _mean(values: Sequence[float], clusters: Sequence[str]) -> Interval:
    numbers = {name: place for place, name in enumerate(dict.fromkeys(clusters))}
    rows: Floats = np.array(values, dtype=np.float64)
    cluster: Ints = np.array([numbers[name] for name in clusters], dtype=np.int64)
    return clustered_mean(rows, cluster)


def plan(planner: Planner, config: CompareConfig) -> Sampling:
    lengths = planner.answered(
        config.prompts, config.max_new_tokens, config.on_overlong, lambda run: start_of(run).tokenizer
    )
    num_prompts = planner.sizes.num_rows(config.prompts)
    config = config.sized(num_prompts)
    return Sampling(
        planner.model,
        num_prompts,
        config.num_samples,
        config.max_new_tokens,
        lengths,
        at_once=config.num_samples,
        measured_by=("reference",),
    )
