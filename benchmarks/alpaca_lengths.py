"""How far is the win rate at equal length from AlpacaEval's? `python -m benchmarks.alpaca_lengths FOLDER`.

FOLDER is a clone of https://github.com/tatsu-lab/alpaca_eval. The table has a row for each range of overlap, the share
of instructions on which the side that is seldom longer is the longer one, with the errors in points of the joint
fit, the fit of one model and the raw win rate, all against `length_controlled_winrate` of its leaderboard.
"""

import argparse
import csv
import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.compare_worlds import comparisons
from evaluation.statistics.win_rates import LEAST_OVERLAP, joint_fit, overlap_of, win_rate_at_equal_length
from evaluation.verdicts import Comparisons

ANNOTATOR = "weighted_alpaca_eval_gpt4_turbo"
LEADERBOARD = f"src/alpaca_eval/leaderboards/data_AlpacaEval_2/{ANNOTATOR}_leaderboard.csv"
RANGES = (0.0, LEAST_OVERLAP, 1.0)
LEAST_PRINTED = 0.0  # the fit also where Heed gives none


def verdicts(path: Path, place: int, num_models: int, number_of: dict[str, int]) -> Comparisons:
    """Returns a model's verdicts against the baseline, which is policy `num_models`; `number_of` numbers prompts."""
    rows = [row for row in json.loads(path.read_text(encoding="utf-8")) if row["preference"] is not None]
    prompt_V = np.array([number_of.setdefault(row["instruction"], len(number_of)) for row in rows])
    won_V = np.array([(row["preference"] or 1.5) - 1 for row in rows])
    longer_V = np.array([float(len(row["output_2"]) - len(row["output_1"])) for row in rows])
    pairs = (np.full(len(rows), place), np.full(len(rows), num_models))
    return comparisons(won_V, prompt_V, pairs=pairs, longer_V=longer_V)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    with (folder / LEADERBOARD).open(encoding="utf-8", newline="") as file:
        published = {row[""]: float(row["length_controlled_winrate"] or "nan") for row in csv.DictReader(file)}
    paths = {model: folder / "results" / model / ANNOTATOR / "annotations.json" for model in published}
    kept = [model for model, path in paths.items() if path.is_file()]
    number_of: dict[str, int] = {}
    models = [verdicts(paths[model], place, len(kept), number_of) for place, model in enumerate(kept)]
    truths = [published[model] for model in kept]
    known = [place for place, model in enumerate(models) if model.longer_V.any() and np.isfinite(truths[place])]
    models, truth_M = [models[place] for place in known], np.array([truths[place] for place in known])
    overlap_M = np.array([overlap_of(model.longer_V, np.ones(len(model))) for model in models])
    estimates = {
        "joint fit": [part.mean for part in joint_fit(models)],
        "fit of one": [win_rate_at_equal_length(model.won_V, model.longer_V, LEAST_PRINTED) for model in models],
        "raw": [float(model.won_V.mean()) for model in models],
    }
    print(f"| overlap | models | {' | '.join(f'{name}: mean, largest' for name in estimates)} |\n|---|---|---|---|---|")
    for low, high in pairwise(RANGES):
        in_range_M = (overlap_M >= low) & (overlap_M < high)
        if in_range_M.any():
            errors = [np.abs(100 * np.array(found) - truth_M)[in_range_M] for found in estimates.values()]
            cells = " | ".join(f"{error.mean():.1f}, {error.max():.1f}" for error in errors)
            print(f"| {low:.0%} to {high:.0%} | {in_range_M.sum()} | {cells} |")


if __name__ == "__main__":
    main()
