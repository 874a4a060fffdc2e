"""The comparison of a run on a few made-up samples, worked by hand; `heed compare` gives the same numbers."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.compare.folder import CompareConfig
from evaluation.compare.judges import gold_judge
from evaluation.compare.results import CompareResults
from evaluation.compare.sampled import Sampled, best_of, compare_sampled
from evaluation.judges.judge import ScoreJudge
from evaluation.measures.best_of_n import best_of_n_scores
from evaluation.policies import Policy
from evaluation.verdicts import read_verdicts
from heed.cli import app
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld
from reward.sampling import Sample
from training.data import DataConfig, Prompt

EARLIER = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hello."},
)
PROMPTS = [
    Prompt(prompt_id=name, messages=(*earlier, {"role": "user", "content": f"ask {name}"}), kind=kind)
    for name, kind, earlier in (("a", "story", ()), ("b", "list", EARLIER), ("c", "story", ()))
]
NAN = math.nan


class NumberWorld:
    """A world whose gold score is the number in a response, minus a tenth if the response names another prompt."""

    judge_names = ("gold",)
    pass_mark = 0.5

    def describe(self) -> str:
        return "Reads the number."

    def gold_scores(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [
            float(r.split()[0]) - (0.0 if p == f"ask {r.split()[1]}" else 0.1)
            for p, r in zip(prompts, responses, strict=True)
        ]


def gold(world: Any) -> ScoreJudge:
    return gold_judge(world.judge_names[0], "gold:../job.toml", world)


def samples(golds: Sequence[Sequence[float]], scores: Any = None, ratios: Any = None) -> list[Sample]:
    """Makes samples with these gold scores, prompt after prompt."""
    return [
        Sample(
            prompt_id=prompt.prompt_id,
            index=index,
            response=f"{value} {prompt.prompt_id}",
            num_tokens=10 * (index + 1),
            finished=index == 0,
            log_ratio=NAN if ratios is None else ratios[row][index],
            score=NAN if scores is None else scores[row][index],
        )
        for row, prompt in enumerate(PROMPTS)
        for index, value in enumerate(golds[row])
    ]


POOL = samples(
    [[0.2, 0.6], [0.9, 0.9], [0.1, 0.5]],
    scores=[[1.0, 2.0], [3.0, 4.0], [9.0, 5.0]],
    ratios=[[0.5, 1.5], [-1.0, 1.0], [2.0, 2.0]],
)
OTHER = samples([[0.4, 0.4], [0.9, 0.2], [0.8, 0.7]])


def sampled_of(
    samples: dict[str, list[Sample]], prompts: Sequence[Prompt] = PROMPTS, *, has_pool: bool = True, **more: Any
) -> Sampled:
    """Makes samples of "sft", from which the other policies were trained; "ppo" was trained to raise the score."""
    policies = [
        (Policy(name, "initial" if name == "sft" else "trained", trainer=name, raises_score=name == "ppo"), rows)
        for name, rows in samples.items()
    ]
    return Sampled(prompts, policies, has_pool, seed=0, **more)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompareResults]:
    folder = tmp_path_factory.mktemp("run") / "compare"
    folder.mkdir()
    sampled = sampled_of({"sft": POOL, "ppo": OTHER})
    config = CompareConfig(prompts=DataConfig(source="prompts.jsonl"), num_samples=2, best_of=2, max_new_tokens=30)
    world: Any = NumberWorld()
    return folder, compare_sampled(
        folder,
        config,
        sampled,
        gold(world),
        lambda _step: lambda _done, _total: None,
    )


def test_figures_of_a_policy_by_hand(compared: tuple[Path, CompareResults]) -> None:
    _, results = compared
    assert list(results.policies) == ["sft", "best_of_2", "ppo"]
    sft, best, ppo = (results.policies[name] for name in ("sft", "best_of_2", "ppo"))
    assert sft.gold_score.mean == pytest.approx((0.2 + 0.6 + 0.9 + 0.9 + 0.1 + 0.5) / 6)
    assert sft.pass_share.mean == pytest.approx(3 / 6)  # above the pass mark, not at it
    assert sft.kl_nats is not None
    assert sft.kl_nats.mean == pytest.approx((0.5 + 1.5 - 1 + 1 + 2 + 2) / 6)
    assert sft.proxy_score is not None
    assert sft.proxy_score.mean == pytest.approx(24 / 6)
    assert (sft.end_rate, sft.mean_tokens) == (0.5, 15)
    assert sft.by_kind == pytest.approx({"story": (0.2 + 0.6 + 0.1 + 0.5) / 4, "list": 0.9})
    for found in (sft.gold_score, sft.pass_share, sft.kl_nats, sft.proxy_score):
        assert found.low <= found.mean <= found.high
    # Values that were not measured are None, never 0; the log-ratio of a best-of-n sample is not a KL.
    assert (ppo.kl_nats, ppo.proxy_score, best.kl_nats) == (None, None, None)
    assert best.gold_score.mean == pytest.approx((0.6 + 0.9 + 0.1) / 3)


def test_policies_without_a_reward_model_have_no_best_of_n(tmp_path: Path) -> None:
    """DPO trains without one: nothing scores the pool, and no score was climbed that could be hacked."""
    config = CompareConfig(prompts=DataConfig(source="prompts.jsonl"), num_samples=2, max_new_tokens=30)
    unscored = samples([[0.2, 0.6], [0.9, 0.9], [0.1, 0.5]])
    sampled = sampled_of({"sft": unscored, "dpo": OTHER}, has_pool=False)
    world: Any = NumberWorld()
    results = compare_sampled(tmp_path, config, sampled, gold(world), lambda _step: lambda _done, _total: None)
    assert list(results.policies) == ["sft", "dpo"]
    assert results.pairs["dpo/sft"].win_rate.mean == pytest.approx(1 - 1.25 / 3)
    assert (results.best_of_n, results.hacking, results.policies["sft"].proxy_score) == ((), None, None)
    assert (tmp_path / "report.html").is_file()


def test_the_interval_of_a_mean_is_students_over_prompts(compared: tuple[Path, CompareResults]) -> None:
    """Over the prompts' means .4, .9 and .3; t with 2 degrees of freedom is 4.3027."""
    found = compared[1].policies["sft"].gold_score
    means = np.array([0.4, 0.9, 0.3])
    half = 4.302653 * means.std(ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((means.mean() - half, means.mean() + half))


def test_a_stages_intervals_are_over_the_clusters_it_names(
    tmp_path: Path, compared: tuple[Path, CompareResults]
) -> None:
    """Prompts a and b are one cluster, with the sum of residuals .2 - .3333 and .9 - .5333; c is the other."""
    prompts = [prompt.model_copy(update={"cluster": "c" if prompt.prompt_id == "c" else "ab"}) for prompt in PROMPTS]
    config = CompareConfig(
        prompts=DataConfig(source="prompts.jsonl"), cluster_by="document", num_samples=2, best_of=2, max_new_tokens=30
    )
    sampled = sampled_of({"sft": POOL, "ppo": OTHER}, prompts)
    world: Any = NumberWorld()
    results = compare_sampled(tmp_path, config, sampled, gold(world), lambda _step: lambda _done, _total: None)
    assert (results.cluster_by, results.num_clusters) == ("document", 2)
    found, alone = results.policies["sft"].gold_score, compared[1].policies["sft"].gold_score
    means = np.array([0.4, 0.9, 0.3]) - 1.6 / 3
    half = 12.7062 * math.sqrt(2 * ((means[0] + means[1]) ** 2 + means[2] ** 2)) / 3
    assert (found.mean, found.high) == pytest.approx((alone.mean, alone.mean + half), rel=1e-5)
    assert results.best_of_n[0].gold_score.high == pytest.approx(found.high, rel=1e-5)
    settings = json.loads((tmp_path / "compare.json").read_text())
    assert settings["prompts"]["cluster_by"] == "document"
    assert '"cluster": "ab"' in (tmp_path / "prompts.jsonl").read_text()


def test_win_rates_by_hand(compared: tuple[Path, CompareResults]) -> None:
    folder, results = compared
    assert len(results.pairs) == 6
    # a: 0.2 loses twice, 0.6 wins twice: 1/2. b: 0.9 ties 0.9 and beats 0.2, twice: 3/4. c: loses all: 0.
    rate, turned = (results.pairs[name].win_rate for name in ("sft/ppo", "ppo/sft"))
    assert rate.mean == pytest.approx((0.5 + 0.75 + 0) / 3)
    assert turned.mean == pytest.approx(1 - 1.25 / 3)
    assert (turned.low, turned.high) == pytest.approx((1 - rate.high, 1 - rate.low))
    assert rate.num_prompts == 3
    # Every sample of one policy is compared with every sample of the other.
    rows = [row for row in read_verdicts(folder / "verdicts.parquet") if {row.policy_a, row.policy_b} == {"sft", "ppo"}]
    assert sorted((row.prompt_id, row.index_a, row.index_b) for row in rows) == [
        (name, i, j) for name in "abc" for i in range(2) for j in range(2)
    ]


def test_best_of_takes_the_reward_models_favourite() -> None:
    pool = samples(
        [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]], scores=[[5.0, 1.0, 9.0], [0.0, 2.0, 1.0], [3.0, 3.0, 1.0]]
    )
    assert [sample.index for sample in best_of(pool, 3)] == [2, 1, 0]
    assert [sample.index for sample in best_of(pool, 2)] == [0, 1, 0]  # over the first two samples only
    assert [sample.index for sample in best_of(pool, 1)] == [0, 0, 0]
    assert [sample.prompt_id for sample in best_of(pool, 3)] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="prompt 'a' has 3 samples; best-of-4 needs 4"):
        best_of(pool, 4)


def test_the_curve_of_best_of_n_by_hand() -> None:
    golds = [[0.1, 0.2, 0.3, 0.8], [0.4, 0.5, 0.6, 0.0], [0.7, 0.8, 0.9, 0.2]]
    scores = [[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], [1.0, 9.0, 5.0, 2.0]]
    one, two, four = best_of_n_scores(np.array(golds), np.array(scores))
    assert (one.n, two.n, four.n) == (1, 2, 4)
    # n = 1 is the policy itself, so these are the plain means.
    assert one.gold_score.mean == pytest.approx(sum(map(sum, golds)) / 12)
    assert one.proxy_score.mean == pytest.approx(sum(map(sum, scores)) / 12)
    assert one.kl_bound_nats == 0
    # n = 4 chooses from the whole pool.
    assert four.gold_score.mean == pytest.approx((0.8 + 0.4 + 0.8) / 3)
    assert four.proxy_score.mean == pytest.approx((4 + 4 + 9) / 3)
    assert four.kl_bound_nats == pytest.approx(math.log(4) - 3 / 4)
    # n = 2: the six pairs of each prompt's samples.
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    expected = [g[i] if s[i] > s[j] else g[j] for g, s in zip(golds, scores, strict=True) for i, j in pairs]
    assert two.gold_score.mean == pytest.approx(sum(expected) / 18)


def test_a_pool_that_is_no_power_of_two_ends_below_it() -> None:
    pool = np.array([[1.0, 2.0, 3.0]] * 3)
    assert [found.n for found in best_of_n_scores(pool, pool)] == [1, 2]


def test_first_samples_are_shown_with_both_scores(compared: tuple[Path, CompareResults]) -> None:
    shown = compared[1].samples
    assert [(sample.prompt_id, sample.kind, list(sample.messages)) for sample in shown[:2]] == [
        ("a", "story", [{"role": "user", "content": "ask a"}]),
        ("b", "list", [*EARLIER, {"role": "user", "content": "ask b"}]),
    ]
    first = shown[0].responses["sft"]
    assert (first.text, first.gold_score, first.proxy_score) == ("0.2 a", 0.2, 1.0)
    assert shown[0].responses["best_of_2"].text == "0.6 a"
    assert math.isnan(shown[1].responses["ppo"].proxy_score)


def heed(*arguments: str) -> None:
    app(list(arguments), standalone_mode=False)


def test_the_headline_is_what_heed_compare_gives_on_the_same_samples(tmp_path: Path) -> None:
    """PPO against SFT by the gold scorer: the stage and the command give the same win rate and interval."""
    world = PlaygroundWorld(PlaygroundConfig(num_compare_prompts=24))
    world.write_data(tmp_path / "data", 0)
    rows = [json.loads(line) for line in (tmp_path / "data" / "compare_prompts.jsonl").read_text().splitlines()]
    prompts = [Prompt(prompt_id=r["prompt_id"], messages=tuple(r["messages"]), kind=r["kind"]) for r in rows]
    sentences = ("I do not know.", "A dog can run. A fish can swim.", "Yes.", "The fox and the kite went up the hill.")
    generator = np.random.default_rng(0)

    def drawn(num_samples: int) -> list[Sample]:
        return [
            Sample(prompt.prompt_id, index, " ".join(generator.choice(sentences, 2)), 8, True, 0.1, float(index))
            for prompt in prompts
            for index in range(num_samples)
        ]

    folder = tmp_path / "run" / "compare"
    folder.mkdir(parents=True)
    sampled = replace(sampled_of({"sft": drawn(6), "ppo": drawn(2)}, prompts), seed=5)
    source = DataConfig(source=str(tmp_path / "data" / "compare_prompts.jsonl"))
    config = CompareConfig(prompts=source, num_samples=2, best_of=4, max_new_tokens=30)
    results = compare_sampled(
        folder,
        config,
        sampled,
        gold(world),
        lambda _step: lambda _done, _total: None,
    )
    responses, out = folder / "responses.parquet", tmp_path / "again"
    asked = ["--prompts", str(folder / "prompts.jsonl"), "--judge", "gold:playground", "--out", str(out)]
    heed("compare", f"ppo={responses}#ppo", f"sft={responses}#sft", *asked)
    (judge,) = json.loads((out / "report.json").read_text(encoding="utf-8"))["summary"]["judges"]
    (pair,) = judge["pairs"]
    headline = results.pairs[f"{pair['policy_a']}/{pair['policy_b']}"].win_rate
    assert (headline.mean, headline.low, headline.high) == tuple(
        pair["win_rate"][key] for key in ("mean", "low", "high")
    )
    assert 0 < headline.low < headline.mean < headline.high < 1
    measures = json.loads((out / "measures.json").read_text(encoding="utf-8"))["policies"]
    for name in ("sft", "ppo"):
        (scores,) = measures[name]["scores"].values()
        found = results.policies[name].gold_score
        assert scores["mean"] == pytest.approx({"mean": found.mean, "low": found.low, "high": found.high})


def test_another_judge_judges_the_folder_of_a_run(compared: tuple[Path, CompareResults], tmp_path: Path) -> None:
    """A run leaves a comparison: `heed judge` adds a judge, and `heed report` writes its page."""
    folder, _ = compared
    judges = tmp_path / "judges.py"
    judges.write_text(
        "def score(prompts, responses):\n    return [len(text) for text in responses]\n", encoding="utf-8"
    )
    heed("judge", str(folder), f"length={judges}:score")
    heed("report", str(folder))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert [judge["judge"] for judge in report["summary"]["judges"]] == ["gold", "length"]
    assert report["measures"]["best_of_n"][1]["kl_bound_nats"] == pytest.approx(math.log(2) - 1 / 2)
    assert report["measures"]["policies"]["best_of_2"]["kl_bound_nats"] == pytest.approx(math.log(2) - 1 / 2)
    assert report["measures"]["policies"]["best_of_2"]["kl_nats"]["mean"] is None
