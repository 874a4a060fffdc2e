"""The joint fit of several models against one baseline: by brute force, in worlds, and against AlpacaEval's values.

`alpaca_eval.jsonl.gz` has, for twenty models of https://github.com/tatsu-lab/alpaca_eval (Apache-2.0), the published
length-controlled win rate, and by instruction the preference of weighted_alpaca_eval_gpt4_turbo and the model's length
minus the baseline's in characters.
"""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, special

from benchmarks.alpaca_lengths import ANNOTATOR, LEADERBOARD, main
from benchmarks.compare_coverage import coverage
from benchmarks.compare_worlds import against_baseline, comparisons, joint_lengths
from evaluation.statistics import win_rates
from evaluation.statistics.summary import summarise
from evaluation.statistics.win_rates import joint_fit, length_controlled, lengths_controlled
from evaluation.suites.alpaca_eval import at_equal_length, together
from evaluation.suites.suite import Scored
from evaluation.verdicts import Comparisons, Verdict
from preferences.statistics.estimates import Floats

PUBLISHED = Path(__file__).with_name("alpaca_eval.jsonl.gz")


def drawn(seed: int, num_prompts: int, leads: list[float]) -> list[Comparisons]:
    return against_baseline(np.random.default_rng(seed), num_prompts, leads, 0.3)


def test_it_is_the_maximum_that_a_general_minimiser_finds() -> None:
    models = drawn(0, 40, [0.3, -0.5, 0.0])
    t_MP = np.array([np.tanh(m.longer_V / np.sqrt((m.longer_V**2).mean())) for m in models])
    won_MP = np.array([m.won_V for m in models])

    def loss(x: Floats) -> float:
        theta, phi, gamma = x[:3], x[3:6], x[6:]
        logit = theta[:, None] + phi[:, None] * t_MP + gamma
        likelihood = won_MP * special.log_expit(logit) + (1 - won_MP) * special.log_expit(-logit)
        priors = gamma @ gamma / 2.0 + ((phi - phi.mean()) ** 2).sum() / 0.25 + 0.01 * (theta @ theta + phi @ phi)
        return float(priors / 2 - likelihood.sum())

    found = optimize.minimize(loss, np.zeros(46), method="BFGS", options={"gtol": 1e-7})
    for place, part in enumerate(joint_fit(models)):
        expected = special.expit(found.x[place] + found.x[6:]).mean()
        assert part.mean == pytest.approx(expected, abs=1e-5)
        assert part.effect == pytest.approx(found.x[3 + place], abs=1e-4)


def test_its_error_is_that_of_leaving_out_one_prompt_at_a_time() -> None:
    models = drawn(1, 60, [0.4, -0.2])
    whole = joint_fit(models)
    for place, part in enumerate(whole):
        without = [joint_fit([m.where(m.prompt_V != prompt) for m in models])[place] for prompt in range(60)]
        jackknife = math.sqrt(59 * float(np.var([one.mean for one in without])))
        assert math.sqrt(59 / 60 * float((part.error_C**2).sum())) == pytest.approx(jackknife, rel=0.03)
        effects = math.sqrt(59 * float(np.var([one.effect for one in without])))
        assert math.sqrt(59 / 60 * float((part.effect_error_C**2).sum())) == pytest.approx(effects, rel=0.03)


def test_intervals_cover_what_other_prompts_would_show_and_difficulty_misleads_less_than_a_single_fit() -> None:
    found = coverage(joint_lengths, 100, 12, seed=0)
    for num_models in (3, 8):
        assert found[f"{num_models} models, 0 of difficulty: joint"].share >= 0.92
        joint, alone = (found[f"{num_models} models, 0.3 of difficulty: {how}"].share for how in ("joint", "alone"))
        assert joint >= 0.8
        assert joint > alone


def test_only_pairs_with_one_baseline_are_fitted_together_and_each_keeps_its_side() -> None:
    models = drawn(2, 50, [0.5, -0.3])
    alone = [length_controlled(model) for model in models]
    together = lengths_controlled(models)
    assert all(one.mean != other.mean for one, other in zip(alone, together, strict=True))
    turned = lengths_controlled([models[0], models[1].between(2, 1)])
    assert turned[1].mean == pytest.approx(1 - together[1].mean)
    assert (turned[1].low, turned[1].high) == pytest.approx((1 - together[1].high, 1 - together[1].low))
    assert turned[1].length_effect.mean == pytest.approx(together[1].length_effect.mean)
    assert lengths_controlled(models[:1]) == alone[:1]
    third = comparisons(models[0].won_V, np.arange(50), pairs=(np.zeros(50, int), np.ones(50, int)),
                        longer_V=models[0].longer_V)  # fmt: skip
    assert lengths_controlled([*models, third]) == [*alone, length_controlled(third)]


def test_a_model_without_overlap_has_none_and_one_that_always_wins_keeps_its_own() -> None:
    models = drawn(3, 50, [0.5, -0.3, 0.0, 0.2])
    short = comparisons(models[2].won_V, np.arange(50), pairs=(models[2].a_V, models[2].b_V),
                        longer_V=-1 - np.abs(models[2].longer_V))  # fmt: skip
    always = comparisons(np.ones(50), np.arange(50), pairs=(models[3].a_V, models[3].b_V), longer_V=models[3].longer_V)
    first, second, none, own = lengths_controlled([*models[:2], short, always])
    assert first.reason == second.reason == ""
    assert "longer on only 0% of prompts" in none.reason
    assert own == length_controlled(always)


def test_a_comparison_and_the_suite_say_the_same() -> None:
    """`heed verdicts` of a file by one annotator, and `heed evaluate --suite alpaca-eval` of the same preferences."""
    models = drawn(4, 60, [0.6, -0.4, 0.1])
    scored, verdicts = {}, []
    for place, pair in enumerate(models):
        rows = list(zip(pair.prompt_V.tolist(), pair.won_V.tolist(), pair.longer_V.round().tolist(), strict=True))
        name = f"m{place}"
        scored[name] = [
            Scored(str(p), {"win_rate": won, "length_difference": longer}) for p, won, longer in rows[place:]
        ]
        verdicts += [
            Verdict(str(p), name, "base", 0, 0, "j", "j", won, length_a=500 + int(longer), length_b=500)
            for p, won, longer in rows[place:]
        ]
    pairs = summarise(verdicts, ("m0", "m1", "m2", "base"), seed=0).judges[0].pairs
    found = together(scored)
    for place, pair in enumerate(pairs):
        rows = found[f"m{place}"]
        assert at_equal_length(rows) == pytest.approx(pair.length_controlled.mean, abs=1e-9)
        values = np.array([row.values["joint_length_controlled"] for row in rows])
        half = (special.logit(pair.length_controlled.high) - special.logit(pair.length_controlled.low)) / 2
        share = pair.length_controlled.mean
        error = special.stdtrit(len(rows) - 1, 0.975) * values.std(ddof=1) / math.sqrt(len(values))
        assert error == pytest.approx(half * share * (1 - share), rel=0.05)
    assert together({"m0": scored["m0"]})["m0"] == scored["m0"]


def published() -> list[tuple[float, Comparisons]]:
    rows = [json.loads(line) for line in gzip.decompress(PUBLISHED.read_bytes()).splitlines()]
    models = []
    for place, row in enumerate(rows):
        won, longer = (np.array(row[name], dtype=float) for name in ("preference", "longer"))
        known = np.flatnonzero(np.isfinite(won))
        pairs = (np.full(len(known), place), np.full(len(known), len(rows)))
        models.append((row["published"], comparisons(won[known], known, pairs=pairs, longer_V=longer[known])))
    return models


def test_it_is_nearer_to_alpaca_evals_published_values_than_fits_of_single_models(monkeypatch) -> None:
    truths, models = zip(*published(), strict=True)
    ours = np.array([[100 * found.mean for found in lengths_controlled(models)], truths])
    is_known = np.isfinite(ours[0])
    alone = np.array([100 * length_controlled(model).mean for model in models])
    assert is_known.sum() == 7  # the others are longer, or shorter, on fewer than 15% of instructions
    joint, single = (np.abs(values - ours[1])[is_known] for values in (ours[0], alone))
    assert joint.mean() < 0.5
    assert joint.max() < 1.0
    assert single.mean() > 1.5 * joint.mean()
    monkeypatch.setattr(win_rates, "LEAST_OVERLAP", 0.0)
    every = [
        np.abs(np.array([100 * found.mean for found in fitted]) - ours[1])[~is_known].mean()
        for fitted in (lengths_controlled(models), map(length_controlled, models))
    ]
    assert every[0] < 2.5 < 6 < every[1]


def test_the_benchmark_prints_the_errors_of_a_clone(tmp_path, monkeypatch, capsys) -> None:
    """Three published models as a clone of AlpacaEval holds them, and one without a published value."""
    leaderboard = tmp_path / LEADERBOARD
    leaderboard.parent.mkdir(parents=True)
    rows = [json.loads(line) for line in gzip.decompress(PUBLISHED.read_bytes()).splitlines()][:3]
    lines = [f"{row['model']},{row['published']}" for row in rows]
    leaderboard.write_text("\n".join([",length_controlled_winrate", *lines, "another,"]), encoding="utf-8")
    for row in rows:
        both = [
            {"instruction": str(n), "preference": 1 + won, "output_1": "x" * max(0, -x), "output_2": "x" * max(0, x)}
            for n, (won, x) in enumerate(zip(row["preference"], row["longer"], strict=True))
            if won is not None
        ]
        path = tmp_path / "results" / row["model"] / ANNOTATOR / "annotations.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(both[::-1]), encoding="utf-8")  # in any order
    monkeypatch.setattr("sys.argv", ["alpaca_lengths", str(tmp_path)])
    main()
    _, _, *table = capsys.readouterr().out.splitlines()
    models = [model for _, model in published()[:3]]
    errors = [abs(100 * part.mean - row["published"]) for part, row in zip(joint_fit(models), rows, strict=True)]
    overlaps = [win_rates.overlap_of(model.longer_V, np.ones(len(model))) for model in models]
    enough = [error for error, overlap in zip(errors, overlaps, strict=True) if overlap >= win_rates.LEAST_OVERLAP]
    assert table[-1].startswith(f"| 15% to 100% | {len(enough)} | {np.mean(enough):.1f}, {max(enough):.1f} | ")
