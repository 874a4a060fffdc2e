"""Compares a run's policies on existing samples, by a judge that scores or by people.

It writes the same folder as `heed compare`, with the same code, so `heed judge` and `heed report` can read it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.compare.comparing import Progress, conclude, counts_of, judged, settings_of_clusters
from evaluation.compare.folder import MEASURES, CompareConfig, Settings, read_comparison, versions, write_files
from evaluation.compare.judges import PEOPLE
from evaluation.compare.results import CompareResults, results_of
from evaluation.inputs import clusters_of
from evaluation.judges.judge import ScoreJudge, pairs_of
from evaluation.judges.people import PeopleJudge
from evaluation.measures.best_of_n import BestOfN, best_of_n_scores
from evaluation.measures.policies import Scores, response_scores
from evaluation.measures.reward_hacking import RewardHacking, TrainingScore, measure_reward_hacking
from evaluation.policies import BEST_OF_N, INITIAL, Policy, response_of
from evaluation.statistics.results import Summary
from evaluation.verdicts import Response, places_of
from files.atomic import write_json
from files.hashes import file_hash
from files.records import as_json, record_of
from lm.tokenizer import Messages
from reward.sampling import Sample
from stages.contract import StageWaitsError
from stages.reports.text import DEFAULT_NAMES
from training.data import Prompt

MAX_FAILED_SHARE = 0.1
NUM_SHOWN = 12  # prompts whose responses the report of the run shows next to each other


@dataclass(frozen=True)
class Drawn:
    """A response that a policy learned from, in iteration `step`, with the score that it was trained to raise."""

    step: int
    prompt_id: str
    messages: Messages
    response: str
    score: float


@dataclass(frozen=True)
class Sampled:
    """Policies and their samples, in the order of the report.

    With `has_pool`, the initial policy's samples have scores, by which best-of-n chooses among them; `scorer` is what
    reports call what scores them. `drawn` holds responses that the policy learned from which is trained to raise the
    score.
    """

    prompts: Sequence[Prompt]
    policies: Sequence[tuple[Policy, Sequence[Sample]]]
    has_pool: bool
    seed: int
    drawn: Sequence[Drawn] = ()
    scorer: str = DEFAULT_NAMES.scorer


def best_of(samples: Sequence[Sample], n: int) -> list[Sample]:
    """For each prompt, choose among the first n samples the one that the reward model scores highest."""
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_id, []).append(sample)
    for prompt_id, pool in by_prompt.items():
        if len(pool) < n:
            raise ValueError(f"prompt {prompt_id!r} has {len(pool)} samples; best-of-{n} needs {n}")
    return [max(pool[:n], key=lambda sample: sample.score) for pool in by_prompt.values()]


def compare_sampled(
    folder: Path, config: CompareConfig, sampled: Sampled, judge: ScoreJudge | PeopleJudge, progress: Progress
) -> CompareResults:
    """Judge the samples, and write the comparison's files and report into the existing `folder`.

    Raises:
        ValueError: a prompt has too few samples to choose from, or the judge fails too often.
        StageWaitsError: people have not judged all tasks yet.
    """
    policies, responses = _with_best_of(sampled, config.best_of)
    if isinstance(judge, PeopleJudge):
        responses = _asked(responses, config.num_samples)
        _require_judgments(judge, sampled.prompts, responses, config.judged_share)
    entry, verdicts = judged(judge, sampled.prompts, responses, MAX_FAILED_SHARE, progress)
    settings = _settings(config, sampled, policies, responses, entry)
    write_files(folder, settings, sampled.prompts, [row for rows in responses.values() for row in rows], verdicts)
    if isinstance(judge, ScoreJudge):
        scores = response_scores(verdicts).get(judge.name, {})
        best = _best_of_n(sampled, responses, scores)
        # Needs a scorer other than the reward that training raised.
        is_reward = config.judge_reward or judge.details.get("is_reward")
        hacking = None if is_reward else _hacking(sampled, responses, scores, judge)
        write_json(folder / MEASURES, {"best_of_n": as_json(best), "reward_hacking": as_json(hacking)})
    report = conclude(folder)
    summary = record_of(report["summary"], Summary, "report.json: summary")
    return results_of(read_comparison(folder), summary, NUM_SHOWN)


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
    store = judge.spec.removeprefix(PEOPLE)
    if put.num_tasks - put.num_open < judged_share * put.num_tasks:
        raise StageWaitsError(
            f"compare waits for people: {put.num_open:,} of {put.num_tasks:,} tasks of batch {judge.batch!r} in"
            f" {store} have fewer than {judge.num_labelers} judgments. Once they are labeled (`heed label"
            " serve`), the same command continues; to go on without tasks that everybody skips, set"
            " compare.judged_share"
        )


def _with_best_of(sampled: Sampled, n: int) -> tuple[list[Policy], dict[str, list[Response]]]:
    """Returns the policies and their responses; best-of-n comes after the policy that it chooses from."""
    policies: list[Policy] = []
    responses: dict[str, list[Response]] = {}
    for policy, samples in sampled.policies:
        policies.append(policy)
        responses[policy.name] = [response_of(policy.name, sample) for sample in samples]
        if policy.kind == INITIAL and sampled.has_pool:
            best = Policy(f"best_of_{n}", BEST_OF_N, f"best of {n}", n=n, of=policy.name)
            policies.append(best)
            # The log-ratio of a chosen sample says nothing about the choosing policy, whose KL is known only by its
            # bound.
            responses[best.name] = [
                replace(response_of(best.name, sample), log_ratio=nan) for sample in best_of(samples, n)
            ]
    return policies, responses


def _settings(
    config: CompareConfig,
    sampled: Sampled,
    policies: Sequence[Policy],
    responses: Mapping[str, Sequence[Response]],
    judge: dict[str, Any],
) -> Settings:
    data, path = config.prompts, Path(config.prompts.source)
    sampling = {"sampling": config.model_dump(include={"num_samples", "temperature", "max_new_tokens"})}
    return {
        "scorer": sampled.scorer,
        "policies": [as_json(policy) | ({} if policy.kind == BEST_OF_N else sampling) for policy in policies],
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
    if not sampled.has_pool:
        return ()
    pool = next(responses[policy.name] for policy, _ in sampled.policies if policy.kind == INITIAL)
    gold_R = np.array([gold.get((row.policy, row.prompt_id, row.index), nan) for row in pool])
    proxy_R = np.array([row.proxy_score for row in pool])
    shape = (len(sampled.prompts), -1)
    prompts = [row.prompt_id for row in pool[:: len(pool) // len(sampled.prompts)]]
    clusters = clusters_of(sampled.prompts)
    return best_of_n_scores(gold_R.reshape(shape), proxy_R.reshape(shape), places_of(prompts, clusters))


def _hacking(
    sampled: Sampled, responses: Mapping[str, Sequence[Response]], scores: Scores, judge: ScoreJudge
) -> RewardHacking | None:
    """Compare the policy that is trained to raise the score with the initial one by both scores, also on the responses
    that it learned from, which the judge scores here. Returns None if no policy is.
    """
    raising = next((policy.name for policy, _ in sampled.policies if policy.raises_score), None)
    if raising is None:
        return None
    initial = next(policy.name for policy, _ in sampled.policies if policy.kind == INITIAL)
    drawn = sampled.drawn
    gold_scores = judge.score([s.messages for s in drawn], [s.response for s in drawn]) if drawn else []
    training = [
        TrainingScore(sample.step, sample.prompt_id, sample.score, scored.score)
        for sample, scored in zip(drawn, gold_scores, strict=True)
    ]
    categories = {prompt.prompt_id: prompt.kind for prompt in sampled.prompts}
    clusters = clusters_of(sampled.prompts)
    return measure_reward_hacking(responses[initial], responses[raising], scores, categories, training, clusters)
