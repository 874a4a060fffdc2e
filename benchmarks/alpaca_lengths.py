"""How far is the win rate at equal length from AlpacaEval's? `python -m benchmarks.alpaca_lengths FOLDER`.

FOLDER is a clone of https://github.com/tatsu-lab/alpaca_eval. The table has a row for each range of overlap, the share
of instructions on which the side that is seldom longer is the longer one, with the errors in points of the fit and of
the raw win rate, both against `length_controlled_winrate` of its leaderboard.
"""

import argparse
import csv
import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from evaluation.statistics import win_rates

ANNOTATOR = "weighted_alpaca_eval_gpt4_turbo"
LEADERBOARD = f"src/alpaca_eval/leaderboards/data_AlpacaEval_2/{ANNOTATOR}_leaderboard.csv"
RANGES = (0.0, 0.05, 0.10, win_rates.LEAST_OVERLAP, 1.0)


def errors(path: Path, published: float) -> tuple[float, float, float]:
    """Returns a model's overlap, and the errors of fit and raw win rate in points."""
    rows = [row for row in json.loads(path.read_text(encoding="utf-8")) if row["preference"] is not None]
    won_V = np.array([(row["preference"] or 1.5) - 1 for row in rows])
    longer_V = np.array([float(len(row["output_2"]) - len(row["output_1"])) for row in rows])
    fitted = win_rates.win_rate_at_equal_length(won_V, longer_V)
    overlap = win_rates.overlap_of(longer_V, np.ones_like(won_V))
    return overlap, 100 * fitted - published, 100 * float(won_V.mean()) - published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    win_rates.LEAST_OVERLAP = 0.0  # the fit also where Heed gives none
    with (folder / LEADERBOARD).open(encoding="utf-8", newline="") as file:
        published = {row[""]: float(row["length_controlled_winrate"] or "nan") for row in csv.DictReader(file)}
    paths = [folder / "results" / model / ANNOTATOR / "annotations.json" for model in published]
    models = [(path, published[path.parts[-3]]) for path in paths if path.is_file()]
    found = np.array([errors(path, truth) for path, truth in models])
    found = found[np.isfinite(found).all(axis=1)]
    print("| overlap | models | fit: mean error | largest | raw: mean error | largest |\n|---|---|---|---|---|---|")
    for low, high in pairwise(RANGES):
        size = np.abs(found[(found[:, 0] >= low) & (found[:, 0] < high), 1:])
        if len(size):
            (fit, raw), (fit_most, raw_most) = size.mean(axis=0), size.max(axis=0)
            ends = f"{low:.0%} to {high:.0%}"
            print(f"| {ends} | {len(size)} | {fit:.1f} | {fit_most:.1f} | {raw:.1f} | {raw_most:.1f} |")


if __name__ == "__main__":
    main()
