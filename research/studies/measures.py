"""The measures of one seed: its arms sampled and scored, each once, and one file that findings are computed from.

Arrays are kept in measured/NAME.npz with a stamp of what they depend on. Policies and the reference are sampled on the
same held-out prompts with the same seeds, so arms are paired by prompt. The reference's pool is drawn once and scored
by every reward model.

`research.study --measures FOLDER` reads FOLDER/seed-N.npz instead of running seed N, so a study can continue on another
machine, and a reader can check its verdicts. A file has one array per measure, named after the call that measured it:
"rl/ppo-1/gold_KP", "best_of_n/reward-full/kl_KP", "tokens/grpo-3/0".

Shape letters: K policies, P prompts, N samples of the pool, T tasks, D documents.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np

from evaluation.compare.stage import STAGE as COMPARE
from evaluation.measures.kl import Drawn, Policy, draw, response_kls
from evaluation.measures.language_modelling import bits_and_bytes
from files.atomic import atomic_file
from files.hashes import derive_seed
from files.records import read_record
from heed.jobs.job import JobConfig
from heed.worlds.gold import RUBRIC
from lm.model import LanguageModel
from lm.source import load_for_inference
from lm.tokenizer import Messages, Tokenizer
from lm.weights import ModelFolder
from ppo.alarm import SPOT_CHECKS, read_spot_checks
from ppo.report import PPOResults
from ppo.stage import STAGE as PPO
from preferences.rankings import split_rankings
from preferences.statistics.estimates import Floats
from research.over_optimisation.curves import Curve, Kind, best_of_n_curve
from research.over_optimisation.policies import Gold, gold_of_texts
from research.over_optimisation.run import gold_function, kept_policies
from research.studies.arms import collected, every_arm, with_those_before
from research.studies.findings import Measures
from reward.comparisons import encode_response
from reward.judge import JudgeReward
from reward.rubric import Rubric
from reward.scoring import RewardModel
from reward.stage import STAGE as REWARD
from stages.lineage import LINEAGE
from stages.progress import console
from stages.world import World, label_truth
from training.data import Prompt, TextConfig, read_prompts, read_texts

REFERENCE = "base/sft"
STAMP = "stamp"

Tokens = Sequence[Sequence[int]]
Scorer = Callable[[Tokenizer, Sequence[Messages], Tokens, Tokens], list[float]]  # as `RewardModel.score`


@dataclass(frozen=True)
class SeedMeasures:
    """The measures of one seed, computed on first use. Stages are named "ARM/STAGE". The gold scorer is the world's, or
    [compare]'s `judge_function`."""

    folder: Path
    job: JobConfig
    world: World
    gold: Gold

    @classmethod
    def of(cls, folder: Path, job: JobConfig) -> Self:
        world = job.open_world()
        assert world is not None, "basic_arms refuses jobs without a world"
        judge = job.section_of(COMPARE).judge_function
        return cls(folder, job, world, gold_function(judge) if judge else gold_of_texts(world.gold_scores))

    @property
    def seed(self) -> int:
        return self.job.seed

    def best_of_n(self, judge: str) -> Curve:
        """Returns best-of-n by an arm's reward model, for every power of two up to the pool's size."""
        pool = self._pool()
        return best_of_n_curve(pool["gold_PN"], self._proxy_of_pool(judge))

    def rl(self, arm: str) -> Curve:
        """Returns an arm's policies: those that PPO kept, in training order, or the last one of another stage.

        The proxy is the reward model that the arm optimised, or that was trained on the arm's rankings.
        """
        judge, stage = every_arm(self.job, self.folder)[arm].after[-1], self._stage(arm)
        policies = self._policies(arm)
        kept = self._kept(
            f"{arm}.npz",
            [REFERENCE, f"{judge}/{self._stage(judge)}", f"{arm}/{stage}"],
            lambda: self._along(arm, policies, judge),
        )
        return Curve(
            kind="rl",
            names=tuple(policies),
            **{name: kept[name] for name in ("kl_KP", "gold_KP", "proxy_KP")},
            start_gold_P=self._pool()["gold_PN"].mean(axis=1),
            start_proxy_P=self._proxy_of_pool(judge).mean(axis=1),
        )

    def tokens(self, arm: str) -> Floats:
        """Returns the mean number of tokens of the responses of an arm's last policy [P]."""

        def make() -> dict[str, Floats]:
            drawn = self._draw(Policy.load(list(self._policies(arm).values())[-1]), self._num_samples)
            lengths = np.array([len(response) for response in drawn.responses], dtype=np.float64)
            return {"tokens_P": lengths.reshape(-1, drawn.num_samples).mean(axis=1)}

        return self._kept(f"tokens-{arm}.npz", [f"{arm}/{self._stage(arm)}"], make)["tokens_P"]

    def spot_checks(self, arm: str) -> tuple[Floats, Floats, Floats]:
        """Returns the checks, the scores in standard deviations and the policies' iterations of an arm's alarm [N]."""
        folder = self.folder / arm / PPO.name
        scale, checks = read_record(folder / "results.json", PPOResults), read_spot_checks(folder / SPOT_CHECKS)
        score_N = np.array([check.score for check in checks])
        return (
            np.array([check.check for check in checks]),
            (score_N - scale.score_scale_mean) / scale.score_scale_std,
            np.array([check.policy for check in checks], dtype=np.float64),
        )

    def metrics(self, arm: str) -> Floats:
        raise NotImplementedError  # only `research.studies.policy_runs` keeps them

    def labels(self, arm: str) -> tuple[Floats, Floats]:
        raise NotImplementedError  # only `research.studies.label_choice` chooses labels

    def _stage(self, arm: str) -> str:
        return every_arm(self.job, self.folder)[arm].stages[-1]

    def _policies(self, arm: str) -> dict[str, Path]:
        stage = self._stage(arm)
        folder = self.folder / arm / stage
        return kept_policies(folder) if stage == PPO.name else {stage: folder / "model"}

    @property
    def _num_samples(self) -> int:
        return self.job.section_of(COMPARE).num_samples

    def bits(self, stage: str) -> tuple[Floats, Floats]:
        """Returns bits and bytes [D] of each held-out pretraining text, by a stage's language model."""

        def make() -> dict[str, Floats]:
            sources = [TextConfig(source=str(self._world_file("pretrain_heldout")))]
            model = self.folder / stage / "model"
            bits_D, bytes_D = bits_and_bytes(
                load_for_inference(ModelFolder(model, LanguageModel)), Tokenizer.load(model), list(read_texts(sources))
            )
            return {"bits_D": bits_D, "bytes_D": bytes_D}

        kept = self._kept(f"bits-{stage.replace('/', '-')}.npz", [stage], make)
        return kept["bits_D"], kept["bytes_D"]

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]:
        """Returns per held-out task [T] the pairs that a reward model orders like noiseless gold, and all pairs.

        The tasks are the base's tasks that no arm trained on; a tie in the reward model's scores counts half.
        """
        kept = self._kept(f"right-{judge}.npz", ["base/collect", f"{judge}/reward"], lambda: self._judged(judge))
        return kept["right_T"], kept["compared_T"]

    def _judged(self, judge: str) -> dict[str, Floats]:
        _, heldout = split_rankings(collected(self.folder), self.job.section_of(REWARD).heldout_share, self.seed)
        tasks = {ranking.task_id: ranking for ranking in heldout}
        truth = label_truth(heldout, self.world)
        model = RewardModel.load(self.folder / judge / "reward" / "model")
        sequences = [
            encode_response(model.tokenizer, task.prompt, response)
            for task in tasks.values()
            for response in task.responses
        ]
        scores = iter(model.score_sequences(sequences))
        counts = [pairs_right([next(scores) for _ in task.responses], truth[name]) for name, task in tasks.items()]
        right_T, compared_T = np.array(counts, dtype=np.float64).T
        return {"right_T": right_T, "compared_T": compared_T}

    def _pool(self) -> dict[str, Floats]:
        """Returns the reference's gold scores [P, N], and its responses as concatenated tokens with their lengths."""

        def make() -> dict[str, Floats]:
            drawn = self._draw(Policy.load(self.folder / REFERENCE / "model"), self.job.section_of(COMPARE).best_of)
            gold = self.gold(drawn.conversations, drawn.texts)
            return {
                "gold_PN": np.asarray(gold, dtype=np.float64).reshape(-1, drawn.num_samples),
                "tokens": np.array([token for response in drawn.responses for token in response]),
                "lengths": np.array([len(response) for response in drawn.responses]),
            }

        return self._kept("pool.npz", [REFERENCE], make)

    def _proxy_of_pool(self, judge: str) -> Floats:
        """Returns a reward model's scores of the pool [P, N]."""

        def make() -> dict[str, Floats]:
            pool, tokenizer = self._pool(), Tokenizer.load(self.folder / REFERENCE / "model")
            responses = [part.tolist() for part in np.split(pool["tokens"], np.cumsum(pool["lengths"])[:-1])]
            encoded = [(prompt.messages, tokenizer.encode_prompt(prompt.messages)) for prompt in self._prompts()]
            conversations, queries = zip(
                *(each for each in encoded for _ in range(pool["gold_PN"].shape[1])), strict=True
            )
            scores = self._scorer(judge)(tokenizer, conversations, queries, responses)
            return {"proxy_PN": np.asarray(scores).reshape(pool["gold_PN"].shape)}

        return self._kept(f"pool-{judge}.npz", [REFERENCE, f"{judge}/{self._stage(judge)}"], make)["proxy_PN"]

    def _scorer(self, judge: str) -> Scorer:
        """Returns what scores as an arm's reward model does, or as its language model does by the whole rubric."""
        stage = self._stage(judge)
        folder = self.folder / judge / stage / "model"
        if stage == REWARD.name:
            return RewardModel.load(folder).score
        reward = JudgeReward(model=str(folder), rubric=Rubric.model_validate(RUBRIC))

        def score(
            tokenizer: Tokenizer, conversations: Sequence[Messages], _queries: Tokens, responses: Tokens
        ) -> list[float]:
            texts = [tokenizer.decode(response).strip() for response in responses]
            return [scored.score for scored in reward.score(conversations, texts)]

        return score

    def _along(self, arm: str, policies: Mapping[str, Path], judge: str) -> dict[str, Floats]:
        reference, score = Policy.load(self.folder / REFERENCE / "model"), self._scorer(judge)
        rows: dict[str, list[Floats]] = {"kl_KP": [], "gold_KP": [], "proxy_KP": []}
        for name, folder in policies.items():
            console.print(f"[dim]{self.folder.name}: sampling {arm}, {name}")
            policy = Policy.load(folder)
            drawn = self._draw(policy, self._num_samples)
            kls = response_kls(policy.model, reference.model, drawn.queries, drawn.responses, drawn.temperature)
            proxy = score(policy.tokenizer, drawn.conversations, drawn.queries, drawn.responses)
            gold = self.gold(drawn.conversations, drawn.texts)
            for row, values in (("kl_KP", kls.full_N), ("gold_KP", gold), ("proxy_KP", proxy)):
                rows[row].append(np.asarray(values, dtype=np.float64).reshape(-1, drawn.num_samples).mean(axis=1))
        return {name: np.stack(values) for name, values in rows.items()}

    def _draw(self, policy: Policy, num_samples: int) -> Drawn:
        return draw(
            policy,
            self._prompts(),
            num_samples=num_samples,
            max_new_tokens=self.job.section_of(COMPARE).max_new_tokens,
            temperature=1.0,  # PPO's: the KL is between the policies that it trained
            seed=derive_seed(self.seed, "study"),
        )

    def _prompts(self) -> list[Prompt]:
        config = self.job.section_of(COMPARE).prompts
        path = self._world_file(config.source.removeprefix("world:"))
        return read_prompts(config.model_copy(update={"source": str(path)}))

    def _world_file(self, name: str) -> Path:
        return self.folder / "base" / "world" / "data" / f"{name}.jsonl"

    def _kept(self, name: str, stages: list[str], make: Callable[[], dict[str, Floats]]) -> dict[str, Floats]:
        """Returns arrays measured before from the same stages and settings, or measures and writes them, atomically."""
        made_from: dict[str, Any] = {stage: _fingerprint(self.folder / stage) for stage in stages}
        made_from["compare"] = self.job.section_of(COMPARE).model_dump(mode="json")
        stamp = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
        path = self.folder / "measured" / name
        if path.is_file():
            with np.load(path) as file:
                if str(file["stamp"]) == stamp:
                    return {key: file[key] for key in file.files if key != "stamp"}
        console.print(f"[dim]{self.folder.name}: measuring {name.removesuffix('.npz')}")
        arrays = make()
        path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, stamp=np.array(stamp), **arrays)
        return arrays


def pairs_right(scores: list[float], truth: list[float]) -> tuple[float, int]:
    """Counts the pairs with different truth that the scores order alike (a tie counts half), and all such pairs."""
    right, compared = 0.0, 0
    for i, j in combinations(range(len(scores)), 2):
        if truth[i] != truth[j]:
            compared += 1
            right += 0.5 if scores[i] == scores[j] else float((scores[i] < scores[j]) == (truth[i] < truth[j]))
    return right, compared


def _fingerprint(stage: Path) -> str:
    """Returns a finished stage's fingerprint. Raises: ValueError if it is not finished."""
    if not (stage / LINEAGE).is_file():
        raise ValueError(f"{stage}: no {LINEAGE}; a finished stage was expected")
    return str(json.loads((stage / LINEAGE).read_text(encoding="utf-8"))["fingerprint"])


def measures_file(folder: Path, seed: int) -> Path:
    return folder / f"seed-{seed}.npz"


def stamps_of(job: JobConfig) -> dict[str, str]:
    """Returns by arm a hash of what its measures depend on: the values that the study's job sets, including its seed,
    and the definitions of the arm and of those that it reads.

    Keys at their defaults do not count, so old measures stay readable when keys are added.
    """
    values = job.model_dump(mode="json", exclude_defaults=True, exclude={"cluster", "name", "note"})
    arms = every_arm(job, Path("SEED"))

    def stamp(name: str) -> str:
        read = [[arm.name, arm.stages, arm.after, dict(arm.changes)] for arm in with_those_before(arms, [name])]
        return hashlib.sha256(json.dumps([values, read], sort_keys=True).encode()).hexdigest()

    return {name: stamp(name) for name in arms}


def _arm_of(measure: str) -> str:
    """Returns a measure's arm: ppo-1 for "rl/ppo-1/gold_KP", base for "bits/base/sft/0". The array "stamp", in files
    written before arms had stamps, belongs to none: "".
    """
    return [*measure.split("/"), ""][1]


class ByName:
    """Measures as arrays, each named after the call that measured it. `_make` provides those of a call."""

    def __init__(self, seed: int, arrays: dict[str, Floats]) -> None:
        self.seed, self.arrays = seed, arrays

    def _make(self, kind: str, which: str) -> None:
        raise NotImplementedError

    def best_of_n(self, judge: str) -> Curve:
        return self._curve("best_of_n", judge)

    def rl(self, arm: str) -> Curve:
        return self._curve("rl", arm)

    def tokens(self, arm: str) -> Floats:
        return self._array("tokens", arm, "0")

    def metrics(self, arm: str) -> Floats:
        return self._array("metrics", arm, "0")

    def bits(self, stage: str) -> tuple[Floats, Floats]:
        return self._array("bits", stage, "0"), self._array("bits", stage, "1")

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]:
        return self._array("right_pairs", judge, "0"), self._array("right_pairs", judge, "1")

    def spot_checks(self, arm: str) -> tuple[Floats, Floats, Floats]:
        check_N, score_N, policy_N = (self._array("spot_checks", arm, place) for place in "012")
        return check_N, score_N, policy_N

    def labels(self, arm: str) -> tuple[Floats, Floats]:
        return self._array("labels", arm, "0"), self._array("labels", arm, "1")

    def _curve(self, kind: Kind, which: str) -> Curve:
        arrays = {field.name: self._array(kind, which, field.name) for field in fields(Curve) if field.name != "kind"}
        names = tuple(str(name) for name in arrays.pop("names"))
        return Curve(kind=kind, names=names, **arrays)

    def _array(self, kind: str, which: str, part: str) -> Floats:
        name = f"{kind}/{which}/{part}"
        if name not in self.arrays:
            self._make(kind, which)
        return self.arrays[name]


class Recorded(ByName):
    """Records the measures of a seed as they are called for."""

    def __init__(self, measures: Measures) -> None:
        super().__init__(measures.seed, {})
        self._measures = measures

    def _make(self, kind: str, which: str) -> None:
        measured = getattr(self._measures, kind)(which)
        if isinstance(measured, Curve):
            parts = {field.name: getattr(measured, field.name) for field in fields(measured) if field.name != "kind"}
        else:
            values = measured if isinstance(measured, tuple) else [measured]
            parts = {str(place): value for place, value in enumerate(values)}
        self.arrays |= {f"{kind}/{which}/{part}": np.asarray(value) for part, value in parts.items()}

    def write(self, path: Path, stamps: Mapping[str, str]) -> None:
        """Writes all recorded measures, in addition to what the file has of the same arms, atomically.

        Raises: OSError if the file cannot be written.
        """
        before = _read(path) if path.is_file() else {}
        known = {name for name in stamps if str(before.get(f"{STAMP}/{name}", "")) == stamps[name]}
        arrays = {name: value for name, value in before.items() if _arm_of(name) in known} | self.arrays
        own_stamps = {f"{STAMP}/{arm}": np.array(stamps[arm]) for arm in sorted({_arm_of(name) for name in arrays})}
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **{**arrays, **own_stamps})


class StoredMeasures(ByName):
    """The measures of a seed that `Recorded.write` has stored."""

    def __init__(self, path: Path, seed: int, stamps: Mapping[str, str]) -> None:
        """Reads a file of measures.

        Raises: ValueError if the file is damaged, or was measured with another job or another definition of an arm.
        """
        arrays = _read(path)
        for name in arrays:
            arm = _arm_of(name)
            if str(arrays.get(f"{STAMP}/{arm}", "")) != stamps.get(arm, ""):
                raise ValueError(
                    f"{path}: has measures of another job, or of a different arm {arm}; delete it to run this study's"
                )
        super().__init__(seed, {name: value for name, value in arrays.items() if not name.startswith(f"{STAMP}/")})
        self._path = path

    def _make(self, kind: str, which: str) -> None:
        raise ValueError(
            f"{self._path}: has no {kind} of {which}, since it was written for other findings; delete it to run the"
            " arms again"
        )


def _read(path: Path) -> dict[str, Floats]:
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (BadZipFile, ValueError, EOFError) as error:
        raise ValueError(f"{path}: {error}; a file that `python -m research.study` wrote was expected") from None
