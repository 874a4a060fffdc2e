"""Compares a run's policies on existing samples, by a judge that scores or by people.

It writes the same folder as `heed compare`, with the same code, so `heed judge` and `heed report` can read it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.compare.comparing import Progress, conclude, counts_of, judged, settings_of_clusters
from evaluation.compare.folder import BEST_OF_N, MEASURES, CompareConfig, Settings, versions, write_files
from evaluation.compare.judges import PEOPLE
from evaluation.compare.results import (
    CompareResults,
    JudgeResults,
    PairResults,
    PolicyResults,
    SampledPrompt,
    SampledText,
    WinRateResults,
)
from evaluation.inputs import clusters_of
from evaluation.judges.judge import ScoreJudge, pairs_of
from evaluation.judges.people import PeopleJudge
from evaluation.measures.best_of_n import BestOfN, best_of_n_scores
from evaluation.measures.policies import PolicyMeasures, PolicyScores, Scores, response_scores
from evaluation.measures.reward_hacking import RewardHacking, TrainingScore, measure_reward_hacking
from evaluation.policies import response_of
from evaluation.statistics.results import JudgeSummary, Summary
from evaluation.verdicts import Response, places_of
from files.atomic import write_json
from files.hashes import file_hash
from files.records import as_json, record_of
from ppo.rollout_log import TrainingSample
from preferences.statistics.estimates import UNKNOWN, Interval
from reward.sampling import Sample
from stages.contract import StageWaitsError
from stages.reports.text import DEFAULT_NAMES, Names
from training.data import Prompt

MAX_FAILED_SHARE = 0.1
UNSCORED = PolicyScores(UNKNOWN, UNKNOWN, {})


@dataclass(frozen=True)
class Sampled:
    """Samples by policy, in the order of the report.

    `pool` is the policy that best-of-n chooses from, "" if nothing scores its samples; `training` is PPO's (KL, score)
    per iteration, and `drawn` holds responses that PPO learned from. `names` is what reports call the policies.
    """

    prompts: Sequence[Prompt]
    policies: Mapping[str, Sequence[Sample]]
    pool: str
    training: Sequence[tuple[float, float]]
    seed: int
    drawn: Sequence[TrainingSample] = ()
    names: Names = DEFAULT_NAMES


@dataclass(frozen=True)
class _Measures:
    """The part of measures.json that the results contain."""

    policies: Mapping[str, PolicyMeasures]
    best_of_n: tuple[BestOfN, ...]


def best_of(samples: Sequence[Sample], n: int) -> list[Sample]:
    """For each prompt, choose among the first n samples the one that the reward model scores highest."""
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_id, []).append(sample)
    for prompt_id, pool in by_prompt.items():
        if len(pool) < n:
            raise ValueError(f"prompt {prompt_id!r} has {len(pool)} samples; best-of-{n} needs {n}")
    return [max(pool[:n], key=lambda sample: sample.score) for pool in by_prompt.values()]


def best_of_name(n: int) -> str:
    return f"best_of_{n}"


def compare_sampled(
    folder: Path, config: CompareConfig, sampled: Sampled, judge: ScoreJudge | PeopleJudge, progress: Progress
) -> CompareResults:
    """Judge the samples, and write the comparison's files and report into the existing `folder`.

    Raises:
        ValueError: a prompt has too few samples to choose from, or the judge fails too often.
        StageWaitsError: people have not judged all tasks yet.
    """
    responses = _responses(sampled, config.best_of)
    if isinstance(judge, PeopleJudge):
        responses = _asked(responses, config.num_samples)
        _require_judgments(judge, sampled.prompts, responses, config.judged_share)
    entry, verdicts = judged(judge, sampled.prompts, responses, MAX_FAILED_SHARE, progress)
    settings = _settings(config, sampled, responses, entry)
    write_files(folder, settings, sampled.prompts, [row for rows in responses.values() for row in rows], verdicts)
    scores = response_scores(verdicts).get(judge.name, {})  # people's ratings, if they gave any
    best = () if isinstance(judge, PeopleJudge) else _best_of_n(sampled, responses, scores)
    write_json(folder / MEASURES, {"best_of_n": as_json(best)})
    report = conclude(folder)
    summary = record_of(report["summary"], Summary, "report.json: summary")
    measures = record_of(report["measures"], _Measures, "report.json: measures")
    (by_gold,) = summary.judges
    return CompareResults(
        judge=_described(judge),
        num_prompts=len(sampled.prompts),
        num_samples=config.num_samples,
        temperature=config.temperature,
        policies={name: _policy(policy_measures, judge.name) for name, policy_measures in measures.policies.items()},
        pairs=dict(_pairs(by_gold)),
        best_of_n=measures.best_of_n,
        cluster_by=config.cluster_by,
        num_clusters=len({prompt.cluster for prompt in sampled.prompts}) if config.cluster_by else 0,
        training_kl_nats=tuple(kl for kl, _ in sampled.training),
        training_scores=tuple(score for _, score in sampled.training),
        samples=_shown(sampled.prompts[: config.num_shown], responses, scores),
        # Needs a scorer other than the reward that training raised.
        hacking=None
        if isinstance(judge, PeopleJudge) or config.judge_reward or judge.details.get("is_reward")
        else _hacking(sampled, responses, scores, judge),
    )


def _asked(responses: Mapping[str, Sequence[Response]], num_samples: int) -> dict[str, list[Response]]:
    """Returns the first `num_samples` responses of each policy to each prompt, since people do not judge the whole pool
    of best-of-n.
    """
    first_rows: dict[str, list[Response]] = {}
    for name, rows in responses.items():
        num_seen: Counter[str] = Counter()
        for row in rows:
            num_seen[row.prompt_id] += 1
            if num_seen[row.prompt_id] <= num_samples:
                first_rows.setdefault(name, []).append(row)
    return first_rows


def _require_judgments(
    judge: PeopleJudge, prompts: Sequence[Prompt], responses: Mapping[str, Sequence[Response]], judged_share: float
) -> None:
    """Put the tasks into the label store. Raises: StageWaitsError while too few of them are judged."""
    put = judge.put_tasks(pairs_of(prompts, responses))
    if put.num_tasks - put.num_open < judged_share * put.num_tasks:
        raise StageWaitsError(
            f"compare waits for people: {put.num_open:,} of {put.num_tasks:,} tasks of batch {judge.batch!r} in"
            f" {_store_of(judge)} have fewer than {judge.num_labelers} judgments. Once they are labeled (`heed label"
            " serve`), the same command continues; to go on without tasks that everybody skips, set"
            " compare.judged_share"
        )


def _store_of(judge: PeopleJudge) -> str:
    return judge.spec.removeprefix(PEOPLE)


def _described(judge: ScoreJudge | PeopleJudge) -> JudgeResults:
    if isinstance(judge, PeopleJudge):
        about = f"people, {judge.num_labelers} per task, by the labels in {_store_of(judge)}"
        return JudgeResults(judge.name, about, "people")
    is_reward = bool(judge.details.get("is_reward"))
    return JudgeResults(judge.name, str(judge.details["description"]), judge.kind, is_reward)


def _responses(sampled: Sampled, n: int) -> dict[str, list[Response]]:
    """Returns responses by policy; best-of-n comes after the policy that it chooses from."""
    responses: dict[str, list[Response]] = {}
    for name, samples in sampled.policies.items():
        responses[name] = [response_of(name, sample) for sample in samples]
        if name == sampled.pool:
            best, chosen = best_of_name(n), best_of(samples, n)
            # The log-ratio of a chosen sample says nothing about the choosing policy, whose KL is known only by its
            # bound.
            responses[best] = [replace(response_of(best, sample), log_ratio=nan) for sample in chosen]
    return responses


def _settings(
    config: CompareConfig, sampled: Sampled, responses: Mapping[str, Sequence[Response]], judge: dict[str, Any]
) -> Settings:
    data, path = config.prompts, Path(config.prompts.source)
    chosen = {"name": best_of_name(config.best_of), "kind": BEST_OF_N, "n": config.best_of, "of": sampled.pool}
    sampling = config.model_dump(include={"num_samples", "temperature", "max_new_tokens"})
    return {
        "names": as_json(sampled.names),
        "policies": [
            chosen if name == chosen["name"] else {"name": name, "kind": "stage", "sampling": sampling}
            for name in responses
        ],
        "prompts": {
            **data.model_dump(include={"split", "subset", "max_rows"}),
            "source": path.name,
            "category": "",
            **settings_of_clusters(config.cluster_by),
            "sha256": file_hash(path) if path.is_file() else "",
            "num_prompts": len(sampled.prompts),
        },
        "seed": sampled.seed,
        "responses": {name: counts_of(rows) for name, rows in responses.items()},
        "judges": [judge],
        "versions": versions(),
    }


def _best_of_n(sampled: Sampled, responses: Mapping[str, Sequence[Response]], gold: Scores) -> tuple[BestOfN, ...]:
    """Returns best-of-n scores from the whole pool, which is sorted by prompt; empty if there is no pool."""
    if not sampled.pool:
        return ()
    pool = responses[sampled.pool]
    gold_R = np.array([gold.get((row.policy, row.prompt_id, row.index), nan) for row in pool])
    proxy_R = np.array([row.proxy_score for row in pool])
    shape = (len(sampled.prompts), -1)
    prompts = [row.prompt_id for row in pool[:: len(pool) // len(sampled.prompts)]]
    clusters = clusters_of(sampled.prompts)
    return best_of_n_scores(gold_R.reshape(shape), proxy_R.reshape(shape), places_of(prompts, clusters))


def _policy(measures: PolicyMeasures, judge: str) -> PolicyResults:
    gold, diversity = measures.scores.get(judge, UNSCORED), measures.diversity
    assert diversity.tokens is not None, "a sampled response has a number of tokens"
    return PolicyResults(
        gold_score=gold.mean,
        pass_share=gold.pass_share,
        kl_nats=_known(measures.kl_nats),
        proxy_score=_known(measures.proxy_score),
        distinct_2=diversity.across.distinct_2,
        end_rate=diversity.finished.mean,
        mean_tokens=diversity.tokens.mean.mean,
        by_kind=gold.by_category,
    )


def _hacking(
    sampled: Sampled, responses: Mapping[str, Sequence[Response]], scores: Scores, judge: ScoreJudge
) -> RewardHacking | None:
    """Compare PPO with SFT by both scores, also on the responses that PPO learned from, which the judge scores here.
    Returns None without PPO, because other policies are not trained to raise a score.
    """
    if "ppo" not in responses:
        return None
    drawn = sampled.drawn
    gold_scores = judge.score([s.messages for s in drawn], [s.response for s in drawn]) if drawn else []
    training = [
        TrainingScore(sample.step, sample.prompt_id, sample.score, scored.score)
        for sample, scored in zip(drawn, gold_scores, strict=True)
    ]
    categories = {prompt.prompt_id: prompt.kind for prompt in sampled.prompts}
    clusters = clusters_of(sampled.prompts)
    return measure_reward_hacking(responses["sft"], responses["ppo"], scores, categories, training, clusters)


def _known(interval: Interval) -> Interval | None:
    return None if np.isnan(interval.mean) else interval


def _pairs(judge: JudgeSummary) -> Iterator[tuple[str, PairResults]]:
    """Yields every two policies in both orders."""
    for pair in judge.pairs:
        rate, holm_p = pair.win_rate, pair.significance.holm_p
        one = WinRateResults(rate.mean, rate.low, rate.high, rate.num_prompts, holm_p)
        other = WinRateResults(1 - rate.mean, 1 - rate.high, 1 - rate.low, rate.num_prompts, holm_p)
        yield f"{pair.policy_a}/{pair.policy_b}", PairResults(one)
        yield f"{pair.policy_b}/{pair.policy_a}", PairResults(other)


def _shown(
    prompts: Sequence[Prompt], responses: Mapping[str, Sequence[Response]], scores: Scores
) -> tuple[SampledPrompt, ...]:
    """Returns the first sample of every policy on each prompt, with gold and reward model scores."""
    firsts: dict[tuple[str, str], Response] = {}
    for row in (row for rows in responses.values() for row in rows):
        firsts.setdefault((row.policy, row.prompt_id), row)
    return tuple(
        SampledPrompt(
            prompt_id=prompt.prompt_id,
            kind=prompt.kind,
            messages=prompt.messages,
            responses={name: _text(firsts[name, prompt.prompt_id], scores) for name in responses},
        )
        for prompt in prompts
    )


def _text(row: Response, scores: Scores) -> SampledText:
    return SampledText(row.text, scores.get((row.policy, row.prompt_id, row.index), nan), row.proxy_score)
