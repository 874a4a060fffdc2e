"""`research.study label-choice`: rounds of labeling in which each rule of `preferences.task_selection` chooses pairs;
and `CHOICES`, the findings that compare the rules.

All seeds share one SFT policy, that of the job's own seed, since pretraining is most of a study's cost. A seed draws
the labelers, the first labels, every choice and every answer's noise.

    runs/study/policy/base   the job's pretraining and SFT
    runs/study/policy/pool   responses to the prompts of `collect` and `compare`, their features and gold scores

A rule starts from random labels and doubles them three times. Each time, labelers judge as many pairs again as there
are labels, which the rule chooses by the reward model so far. Reward models are linear heads on frozen features of the
policy, fitted by maximum a posteriori. Their posterior is the ensemble that the rules need, by Laplace's approximation:

    w ~ N(ŵ, H⁻¹),   H = (D + 1)·I + Σ p(1 - p)·x xᵀ,   p = σ(ŵᵀx)

where x is the difference of the features of a label's two responses, ŵ the fitted head, and (D + 1)·I the precision of
the prior that heads of reward models are initialised from (`lm.model.init_weights`).

Shape letters: C candidates, D features, E heads, L labels, N samples of the pool, P prompts, T held-out tasks.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evaluation.compare.stage import STAGE as COMPARE
from evaluation.measures.kl import Policy, draw
from files.atomic import atomic_file
from files.hashes import derive_seed
from heed.jobs.job import JobConfig
from heed.jobs.pipeline import run_job
from lm.model import LanguageModel
from lm.source import load_for_inference
from lm.tokenizer import Tokenizer
from lm.transfer import pad_right
from lm.weights import ModelFolder
from preferences.rankings import is_heldout
from preferences.records import Answer, Labeler, Message, ShownTask, Task
from preferences.statistics.estimates import Floats, Interval
from preferences.statistics.intervals import difference_of_means
from preferences.task_selection import RULES, Candidate, PromptCandidates, choose_tasks
from research.over_optimisation.curves import Curve, best_of_n_curve
from research.studies.arms import Arm, arm_job
from research.studies.findings import ACCURACY, GOLD, Finding, Measures
from research.studies.measures import pairs_right
from research.studies.verdicts import Contrast, Rule, bootstrap_mean, ratio_difference
from reward.collect import STAGE as COLLECT
from reward.comparisons import encode_answered
from reward.stage import STAGE as REWARD
from stages.progress import console
from stages.world import World
from training.data import DataConfig, Prompt, read_prompts

NUM_ROUNDS = 4  # each has twice the labels of the one before
COMPARED_ROUND = 2  # with half of the last round's labels
RIGHT = Rule("above", 0.01, "of the labels")
DOUBLINGS = Rule("above", 0.25, "doublings of the labels")
NUM_HEADS = 16
NEWTON_STEPS = 50
ROWS = 256  # responses per pass


def choice_arm(rule: str, number: int) -> str:
    """Returns the name of a rule's reward model after this round; all rules share the first."""
    return f"{rule}-{number}" if number else "first"


CHOICE_ARMS = (choice_arm("", 0), *(choice_arm(rule, n) for rule in RULES for n in range(1, NUM_ROUNDS)))


@dataclass(frozen=True)
class HeadPosterior:
    """The normal distribution of a linear head: its mean [D] and precision [D, D]."""

    mean_D: Floats
    precision_DD: Floats

    @classmethod
    def laplace(cls, head_D: Floats, difference_LD: Floats) -> "HeadPosterior":
        """Approximates it around a head, given the differences of the compared responses' features."""
        chance_L = _sigmoid(difference_LD @ head_D)
        seen_DD = (difference_LD * (chance_L * (1 - chance_L))[:, None]).T @ difference_LD
        return cls(head_D, seen_DD + (len(head_D) + 1) * np.eye(len(head_D)))

    @classmethod
    def fitted(cls, difference_LD: Floats, vote_L: Floats) -> "HeadPosterior":
        """Fits the head by Newton's method. A vote is 1 for the first response, 0 for the second, or ½ for a tie, which
        is half a win for each.
        """
        posterior = cls.laplace(np.zeros(difference_LD.shape[1]), difference_LD)
        for _ in range(NEWTON_STEPS):
            head_D = posterior.mean_D
            error_L = vote_L - _sigmoid(difference_LD @ head_D)
            step_D = np.linalg.solve(posterior.precision_DD, difference_LD.T @ error_L - (len(head_D) + 1) * head_D)
            posterior = cls.laplace(head_D + step_D, difference_LD)
            if np.abs(step_D).max() < 1e-8:
                break
        return posterior

    def draw(self, num_heads: int, seed: int) -> Floats:
        """Returns heads [E, D] drawn from the distribution."""
        normal_DE = np.random.default_rng(seed).standard_normal((len(self.mean_D), num_heads))
        root_DD = np.linalg.cholesky(self.precision_DD)
        return np.asarray(self.mean_D + np.linalg.solve(root_DD.T, normal_DE).T)


def _sigmoid(gap: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(gap / 2)))


@torch.inference_mode()
def features_of(folder: Path, conversations: Sequence[Sequence[Mapping[str, str]]]) -> Floats:
    """Returns what heads read of each conversation's last response: the policy's states at its last token and, on
    average, at all its tokens [C, D].
    """
    model, tokenizer = load_for_inference(ModelFolder(folder, LanguageModel)), Tokenizer.load(folder)
    encoded = [encode_answered(tokenizer, [dict(turn) for turn in turns]) for turns in conversations]
    order = sorted(range(len(encoded)), key=lambda place: len(encoded[place].tokens))
    features: list[Floats] = [np.empty(0)] * len(encoded)
    device = next(model.parameters()).device
    for start in range(0, len(order), ROWS):
        places = order[start : start + ROWS]
        tokens_BT, segments_BT = pad_right([encoded[place].tokens for place in places], device)
        states_BTD = model.decoder.hidden(tokens_BT, segments_BT).float().cpu().numpy()
        for row, place in enumerate(places):
            end = len(encoded[place].tokens)
            own_TD = states_BTD[row, end - encoded[place].response_tokens : end]
            features[place] = np.concatenate([own_TD[-1], own_TD.mean(axis=0)])
    return np.stack(features).astype(np.float32)


@dataclass(frozen=True)
class Answered:
    """A prompt with responses, their standardised features [C, D] and their gold scores [C]."""

    prompt_id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    features_CD: Floats
    gold_C: Floats

    def distinct(self) -> "Answered":
        """Keeps the first of responses with the same text."""
        kept = [place for place, text in enumerate(self.responses) if text not in self.responses[:place]]
        responses = tuple(self.responses[place] for place in kept)
        return Answered(self.prompt_id, self.prompt, responses, self.features_CD[kept], self.gold_C[kept])


@dataclass(frozen=True)
class Pool:
    """What labels are chosen from, held-out tasks, and the samples of the prompts on which best-of-n is measured."""

    train: Sequence[Answered]
    heldout: Sequence[Answered]
    compared: Sequence[Answered]

    @cached_property
    def by_id(self) -> Mapping[str, Answered]:
        return {answered.prompt_id: answered for answered in self.train}

    @property
    def num_first(self) -> int:
        """How many labels every rule starts with: the last round has a label for most prompts, a power of two."""
        return (1 << (len(self.train).bit_length() - 1)) >> (NUM_ROUNDS - 1)


def choices_of_seed(folder: Path, policy: JobConfig, seed: int) -> "ChoiceMeasures":
    """Trains the policy of the job `policy` in `folder`, unless it is there, and returns a seed's measures."""
    run_job(arm_job(policy, Arm("base", ("pretrain", "sft")), folder), folder)
    world = policy.open_world()
    assert world is not None, "basic_arms refuses jobs without a world"
    console.print(f"[bold]seed {seed}[/]: {', '.join(RULES)}")
    return ChoiceMeasures.of(read_pool(folder, policy, world), world, seed)


def choice_stamps(policy: JobConfig, seed: int) -> dict[str, str]:
    """Returns by arm a hash of what its measures depend on: the values that the policy's job sets, and the seed."""
    return dict.fromkeys(CHOICE_ARMS, _stamp(policy, seed))


def _stamp(policy: JobConfig, *more: int) -> str:
    values = policy.model_dump(mode="json", exclude_defaults=True, exclude={"cluster", "name", "note", "workers"})
    return hashlib.sha256(json.dumps([values, *more], sort_keys=True).encode()).hexdigest()


def read_pool(folder: Path, job: JobConfig, world: World) -> Pool:
    """Samples the policy in `folder`/base, or reads the samples that were drawn before; `job` is the policy's.

    Raises: ValueError for too few prompts to start with a label.
    """
    share, collect, compare = (
        job.section_of(REWARD).heldout_share, job.section_of(COLLECT), job.section_of(COMPARE),
    )  # fmt: skip
    parts = []
    for name, size, num_samples, max_new_tokens in (
        ("collect", collect.prompts.max_rows, collect.responses_per_prompt, collect.max_new_tokens),
        ("compare", compare.prompts.max_rows, compare.best_of, compare.max_new_tokens),
    ):
        source = str(folder / "base" / "world" / "data" / f"{name}_prompts.jsonl")
        prompts = read_prompts(DataConfig(source=source, max_rows=size))
        path = folder / "pool" / f"{name}.npz"
        if not _is_of(path, job):
            _write_samples(path, folder / "base" / "sft" / "model", prompts, num_samples, max_new_tokens, job, world)
        with np.load(path) as file:
            parts.append((prompts, file["texts"], file["features"].astype(np.float64), file["gold"]))
    mean_D, std_D = parts[0][2].mean(axis=0), parts[0][2].std(axis=0) + 1e-6
    collected, compared = (
        _answered(prompts, texts, (features - mean_D) / std_D, gold) for prompts, texts, features, gold in parts
    )
    tasks = [task for task in (each.distinct() for each in collected) if len(task.responses) > 1]
    held = [is_heldout(task.prompt, share, job.seed) for task in tasks]
    pool = Pool(
        [task for task, is_held in zip(tasks, held, strict=True) if not is_held],
        [task for task, is_held in zip(tasks, held, strict=True) if is_held],
        compared,
    )
    if not pool.num_first or not pool.heldout:
        raise ValueError(
            f"{folder}: {len(pool.train)} prompts to label and {len(pool.heldout)} held out;"
            f" at least {1 << (NUM_ROUNDS - 1)} and 1 were expected"
        )
    return pool


def _is_of(path: Path, job: JobConfig) -> bool:
    """Returns whether a file of samples is there, and was made for this job."""
    if not path.is_file():
        return False
    with np.load(path) as file:
        return str(file["stamp"]) == _stamp(job)


def _write_samples(
    path: Path,
    policy: Path,
    prompts: Sequence[Prompt],
    num_samples: int,
    max_new_tokens: int,
    job: JobConfig,
    world: World,
) -> None:
    drawn = draw(
        Policy.load(policy), prompts, num_samples=num_samples, max_new_tokens=max_new_tokens, temperature=1.0,
        seed=derive_seed(job.seed, "label choice"),
    )  # fmt: skip
    pairs = zip(drawn.conversations, drawn.texts, strict=True)
    conversations = [[*messages, {"role": "assistant", "content": text}] for messages, text in pairs]
    prompts_asked = [messages[-1]["content"] for messages in drawn.conversations]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            stamp=np.array(_stamp(job)),
            texts=np.array(drawn.texts),
            features=features_of(policy, conversations),
            gold=np.array(world.gold_scores(prompts_asked, drawn.texts)),
        )


def _answered(prompts: Sequence[Prompt], texts: NDArray[np.str_], features: Floats, gold: Floats) -> list[Answered]:
    """Splits arrays over all responses, as many to each prompt."""
    num_prompts = len(prompts)
    rows = zip(
        prompts, np.split(texts, num_prompts), np.split(features, num_prompts), np.split(gold, num_prompts), strict=True
    )
    return [
        Answered(
            prompt.prompt_id,
            tuple(Message.of(message) for message in prompt.messages),
            tuple(map(str, own_texts)),
            features_CD,
            gold_C,
        )
        for prompt, own_texts, features_CD, gold_C in rows
    ]


@dataclass(frozen=True)
class Label:
    """A labeled pair: the difference of its responses' features [D], the label's vote (1 for the first, 0 for the
    second, ½ for a tie), and the difference of their gold scores.
    """

    difference_D: Floats
    vote: float
    gap: float


@dataclass(frozen=True)
class Round:
    """What one round of a rule's labels led to: its own labels, and the head fitted to all labels so far."""

    labels: Sequence[Label]
    posterior: HeadPosterior


def rounds(pool: Pool, labelers: Sequence[Labeler], rule: str, seed: int) -> list[Round]:
    """Chooses, labels and fits, `NUM_ROUNDS` times. All rules share the first round of a seed."""
    labels: list[Label] = []
    made: list[Round] = []
    for number in range(NUM_ROUNDS):
        used, batch = (rule, f"{rule}-{number}") if number else ("uniform", "first")
        heads_ED = made[-1].posterior.draw(NUM_HEADS, derive_seed(seed, "heads", batch)) if number else None
        tasks = choose_tasks(
            [_candidates(answered, heads_ED) for answered in pool.train],
            batch=batch,
            rule=RULES[used],
            responses_per_task=2,
            tasks_per_prompt=1,
            evaluation_share=0.0,
            seed=derive_seed(seed, "label choice"),
            num_tasks=len(labels) or pool.num_first,
        )
        judgments = judged(pool, tasks, labelers, seed)
        labels += judgments
        differences = np.stack([label.difference_D for label in labels])
        votes = np.array([label.vote for label in labels])
        made.append(Round(judgments, HeadPosterior.fitted(differences, votes)))
    return made


def _candidates(answered: Answered, heads_ED: Floats | None) -> PromptCandidates:
    scores: list[list[float]] = [[] for _ in answered.responses]
    if heads_ED is not None:
        scores = (answered.features_CD @ heads_ED.T).tolist()
    pairs = zip(answered.responses, scores, strict=True)
    return PromptCandidates(
        answered.prompt_id, answered.prompt, tuple(Candidate(text, "sft", tuple(values)) for text, values in pairs)
    )


def judged(pool: Pool, tasks: Sequence[Task], labelers: Sequence[Labeler], seed: int) -> list[Label]:
    """Lets the labelers judge one pair each in turn, shown in a random order."""
    judgments = []
    for number, task in enumerate(tasks):
        answered = pool.by_id[task.task_id.split("/")[1]]
        first, second = (answered.responses.index(text) for text in task.responses)
        turned = derive_seed(seed, "order shown", task.task_id) % 2 == 1
        responses = task.responses[::-1] if turned else task.responses
        answer = labelers[number % len(labelers)].judge(ShownTask(task.task_id, task.prompt, responses))
        assert isinstance(answer, Answer), "scripted labelers skip no task"
        lead = answer.ranks[1] - answer.ranks[0]
        vote = (1 + np.sign(-lead if turned else lead)) / 2
        gap = float(answered.gold_C[first] - answered.gold_C[second])
        judgments.append(Label(answered.features_CD[first] - answered.features_CD[second], float(vote), gap))
    return judgments


@dataclass(frozen=True)
class ChoiceMeasures:
    """The measures of one seed, by the names of `choice_arm`."""

    seed: int
    pool: Pool
    rounds: Mapping[str, Round]

    @classmethod
    def of(cls, pool: Pool, world: World, seed: int) -> "ChoiceMeasures":
        """Runs every rule's rounds with the labelers of this seed."""
        rounds_by_arm = dict[str, Round]()
        for rule in RULES:
            made = rounds(pool, world.labelers(seed), rule, seed)
            rounds_by_arm |= {choice_arm(rule, number): of_round for number, of_round in enumerate(made)}
        return cls(seed, pool, rounds_by_arm)

    def best_of_n(self, judge: str) -> Curve:
        """Returns best-of-n by a reward model, on the prompts of `compare`."""
        head_D = self.rounds[judge].posterior.mean_D
        gold_PN = np.stack([answered.gold_C for answered in self.pool.compared])
        return best_of_n_curve(gold_PN, np.stack([answered.features_CD @ head_D for answered in self.pool.compared]))

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]:
        """Returns per held-out task [T] the pairs that a reward model orders like noiseless gold, and all pairs."""
        head_D = self.rounds[judge].posterior.mean_D
        counts = [
            pairs_right((answered.features_CD @ head_D).tolist(), answered.gold_C.tolist())
            for answered in self.pool.heldout
        ]
        right_T, compared_T = np.array(counts, dtype=np.float64).T
        return right_T, compared_T

    def labels(self, arm: str) -> tuple[Floats, Floats]:
        """Returns how far apart gold sees the two responses of each label of an arm's own round [L], and whether the
        label orders them alike: 1 if so, ½ if either sees a tie, otherwise 0.
        """
        round_labels = self.rounds[arm].labels
        gap_L = np.array([label.gap for label in round_labels])
        vote_L = np.array([label.vote for label in round_labels])
        return np.abs(gap_L), (1 + np.sign(gap_L) * np.sign(vote_L - 0.5)) / 2

    def rl(self, arm: str) -> Curve:
        raise NotImplementedError

    def tokens(self, arm: str) -> Floats:
        raise NotImplementedError

    def metrics(self, arm: str) -> Floats:
        raise NotImplementedError

    def bits(self, stage: str) -> tuple[Floats, Floats]:
        raise NotImplementedError

    def spot_checks(self, arm: str) -> tuple[Floats, Floats, Floats]:
        raise NotImplementedError


def gold_by_round(measures: Measures, rule: str) -> Floats:
    """Returns the gold score [rounds, P] of the largest best-of-n by each of a rule's reward models."""
    arms = (choice_arm(rule, number) for number in range(NUM_ROUNDS))
    return np.stack([measures.best_of_n(arm).gold_KP[-1] for arm in arms])


def num_labels(measures: Measures, rule: str) -> list[int]:
    """Returns how many labels a rule's reward model of each round learned from."""
    sizes = [len(measures.labels(choice_arm(rule, number))[0]) for number in range(NUM_ROUNDS)]
    return list(itertools.accumulate(sizes))


def doublings_saved(rule_R: Floats, uniform_R: Floats) -> float:
    """Returns how many doublings of random labels a rule's lead is worth, on average over the rounds after the first.

    Both are gold scores by round, and every round doubles the labels. A doubling is worth the slope of the line fitted
    to `uniform_R`; NaN if that is not above 0.
    """
    slope = float(np.polyfit(np.arange(len(uniform_R)), uniform_R, 1)[0])
    return float((rule_R - uniform_R)[1:].mean()) / slope if slope > 0 else math.nan


def _chosen_minus_uniform(measures: Measures, rule: str) -> list[Contrast]:
    """Compares a rule with random pairs: gold of best-of-n and accuracy, each with half of all labels; the labels that
    it saves; and how often the labels of all rounds are right, of near ties less often.
    """
    arms = [choice_arm(name, COMPARED_ROUND) for name in (rule, "uniform")]
    (gold_P, uniform_P), n = (
        ([measures.best_of_n(arm).gold_KP[-1] for arm in arms]),
        measures.best_of_n(arms[0]).names[-1],
    )
    (right, compared), (other, _) = (measures.right_pairs(arm) for arm in arms)
    size = f"with {num_labels(measures, rule)[COMPARED_ROUND]:,} labels"
    saved = doublings_saved(*(gold_by_round(measures, name).mean(axis=1) for name in (rule, "uniform")))
    one, than = ("uniform", rule) if rule == "near-tie" else (rule, "uniform")
    right_L, than_L = (
        np.concatenate([measures.labels(choice_arm(name, number))[1] for number in range(1, NUM_ROUNDS)])
        for name in (one, than)
    )
    return [
        Contrast(
            f"{rule} minus uniform: gold of {n}, {size}", GOLD, bootstrap_mean(gold_P - uniform_P, seed=measures.seed)
        ),
        Contrast(
            f"{rule} minus uniform: accuracy, {size}",
            ACCURACY,
            ratio_difference(right, other, compared, seed=measures.seed),
        ),
        Contrast(f"{rule} saves, in doublings of random labels", DOUBLINGS, Interval(saved, math.nan, math.nan)),
        Contrast(
            f"{one} minus {than}: labels that agree with noiseless gold", RIGHT, difference_of_means(than_L, right_L)
        ),
    ]


def _choice(name: str, title: str, source: str, *rules: str) -> Finding:
    return Finding(
        name, title, source,
        tuple(choice_arm(rule, number) for rule in ("uniform", *rules) for number in range(NUM_ROUNDS)),
        lambda measures: [contrast for rule in rules for contrast in _chosen_minus_uniform(measures, rule)],
        lambda measures: {
            rule: measures.best_of_n(choice_arm(rule, COMPARED_ROUND)) for rule in ("uniform", *rules)
        },
    )  # fmt: skip


CHOICES = (
    _choice("choose-large-gap", "Pairs with a large predicted gap are better to label than random ones",
            "arXiv 2603.09692", "large-gap"),
    _choice("choose-near-tie", "Near ties are better to label than random pairs", "arXiv 2602.01581", "near-tie"),
    _choice("choose-by-ensemble", "Pairs about which an ensemble disagrees are better to label than random ones",
            "arXiv 1112.5745 and 2502.04354", "disagreement", "information"),
)  # fmt: skip
