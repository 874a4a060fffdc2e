"""Which recorded human labels are worth revealing? The rules of `heed label sample`, replayed on published comparisons.

`python -m benchmarks.recorded_labels NAME=FILE... --model MODEL --measures FOLDER` measures five random splits of each
file and prints the tables of research/findings/label-choice.md. Without files, it prints those of the measures in
FOLDER. A file has rankings in any format of docs/labels-formats.md.

People have judged some pairs of each prompt's responses. A replay reveals pairs of the training prompts: random ones
first, and then three times as many again as there are, chosen by a rule. Scores are linear in features of a frozen
language model: principal components of the mean state of a response's tokens after its first blocks. The head's
posterior given the labels so far (`research.studies.label_choice.HeadPosterior`) is the rule's ensemble. Accuracy is
the share of pairs on held-out prompts that the head orders as most labelers do.

Shape letters: C candidates, D features, E heads, L labels, P pairs, R rounds, T held-out prompts.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from files.atomic import atomic_file
from files.hashes import derive_seed
from lm.hub import model_directory
from lm.model import LanguageModel
from lm.source import load_for_inference
from lm.tokenizer import Tokenizer
from lm.transfer import pad_right
from lm.weights import PURPOSES, WithNewHead, read_config
from preferences.rankings import is_heldout
from preferences.records import Message, Ranking
from preferences.statistics.estimates import Floats, Interval
from preferences.statistics.intervals import bootstrap_ratio
from preferences.task_selection import RULES, UNIFORM_SHARE, inclusion_probabilities, mixed, systematic_sample
from research.studies.label_choice import NUM_HEADS, HeadPosterior
from research.studies.study import spread
from research.studies.verdicts import Claim, Contrast, Rule, decide
from reward.comparisons import encode_answered
from reward.config import RankingsConfig
from reward.prepared import read_rankings

NUM_SPLITS, NUM_REPLAYS = 5, 10
NUM_ROUNDS, FIRST_LABELS = 4, 32
HELDOUT_SHARE = 0.3
NUM_FEATURES = 64
NUM_BLOCKS, MAX_TOKENS = 8, 256  # of the language model, and of a conversation, at its end
NUM_RESAMPLES = 2_000
ACCURACY = Rule("above", 0.01, "of accuracy")
COMPARED = ("large-gap", "near-tie", "disagreement", "information")


@dataclass(frozen=True)
class Judged:
    """A prompt's distinct responses and its recorded pairs, with each labeler's vote: 1 for the pair's first response,
    0 for its second, or ½.
    """

    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    votes: dict[tuple[int, int], list[float]]


@dataclass(frozen=True)
class Pool:
    """Judged prompts with the features of their responses, [C, D] per prompt. Their mean variance is 1."""

    judged: Sequence[Judged]
    features: Sequence[Floats]


def judged_prompts(rankings: Sequence[Ranking]) -> list[Judged]:
    """Gathers the pairs that people ranked, by prompt."""
    found: dict[tuple[Message, ...], tuple[dict[str, int], dict[tuple[int, int], list[float]]]] = {}
    for ranking in rankings:
        numbers, votes = found.setdefault(ranking.prompt, ({}, defaultdict(list)))
        members = [numbers.setdefault(text, len(numbers)) for text in ranking.responses]
        for (i, one), (j, other) in combinations(enumerate(members), 2):
            if one != other:
                vote = (1 + np.sign(ranking.ranks[j] - ranking.ranks[i])) / 2
                votes[min(one, other), max(one, other)].append(float(vote if one < other else 1 - vote))
    return [Judged(prompt, tuple(numbers), dict(votes)) for prompt, (numbers, votes) in found.items() if votes]


@torch.inference_mode()
def with_features(judged: Sequence[Judged], folder: Path) -> Pool:
    """Computes every response's features by the first blocks of the language model in `folder`."""
    blocks = read_config(folder, PURPOSES[LanguageModel])[0].num_hidden_layers
    source = WithNewHead(folder, LanguageModel, LanguageModel, 0, dropped=max(0, blocks - NUM_BLOCKS))
    model, tokenizer = load_for_inference(source), Tokenizer.load(folder)
    rows = []
    for of in judged:
        messages = [message.turn for message in of.prompt]
        for text in of.responses:
            encoded = encode_answered(tokenizer, [*messages, {"role": "assistant", "content": text}])
            tokens_1T, segments_1T = pad_right([encoded.tokens[-MAX_TOKENS:]], next(model.parameters()).device)
            states_TD = model.decoder.hidden(tokens_1T, segments_1T)[0, -encoded.response_tokens :]
            rows.append(states_TD.float().mean(dim=0).double().cpu().numpy())
    ends = np.cumsum([len(of.responses) for of in judged])
    return Pool(judged, np.split(components(np.stack(rows)), ends[:-1]))


def components(features_CH: Floats) -> Floats:
    """Returns the first principal components of standardised features, [C, D], scaled to a mean variance of 1."""
    standard_CH = (features_CH - features_CH.mean(axis=0)) / (features_CH.std(axis=0) + 1e-6)
    left_CC, values_C, _ = np.linalg.svd(standard_CH, full_matrices=False)
    found_CD = (left_CC * values_C)[:, :NUM_FEATURES]
    return np.asarray(found_CD / np.sqrt(found_CD.var(axis=0).mean()))


def replay(pool: Pool, rule: str, seed: int, heldout: Sequence[int]) -> Floats:
    """Returns by round how many pairs of each held-out prompt the head has right [R, T]. A tie of the votes is no pair.

    Raises: ValueError for fewer pairs than the last round reveals.
    """
    rng = np.random.default_rng(derive_seed(seed, "replay"))  # the same first labels for every rule
    held = set(heldout)
    pairs = [(n, *pair) for n, of in enumerate(pool.judged) if n not in held for pair in of.votes]
    if len(pairs) < FIRST_LABELS << (NUM_ROUNDS - 1):
        raise ValueError(f"{len(pairs)} pairs to reveal; at least {FIRST_LABELS << (NUM_ROUNDS - 1)} were expected")
    revealed = [int(place) for place in rng.permutation(len(pairs))[:FIRST_LABELS]]
    vote_P = np.array([rng.choice(pool.judged[n].votes[i, j]) for n, i, j in pairs])  # one labeler per pair
    difference_PD = np.stack([pool.features[n][i] - pool.features[n][j] for n, i, j in pairs])
    posteriors = [HeadPosterior.fitted(difference_PD[revealed], vote_P[revealed])]
    for number in range(1, NUM_ROUNDS):
        revealed += _chosen(pool, rule, pairs, revealed, posteriors[-1].draw(NUM_HEADS, seed + number), rng)
        posteriors.append(HeadPosterior.fitted(difference_PD[revealed], vote_P[revealed]))
    return np.array([[right_pairs(pool, n, of.mean_D)[0] for n in heldout] for of in posteriors])


def _chosen(
    pool: Pool,
    rule: str,
    pairs: Sequence[tuple[int, int, int]],
    revealed: Sequence[int],
    heads_ED: Floats,
    rng: np.random.Generator,
) -> list[int]:
    """Chooses as many pairs as are revealed, among the others, as `preferences.task_selection` does."""
    by_prompt: dict[int, list[int]] = defaultdict(list)
    seen = set(revealed)
    for place, (prompt, _, _) in enumerate(pairs):
        if place not in seen:
            by_prompt[prompt].append(place)
    left, weights = list[int](), list[Floats]()
    for prompt, places in by_prompt.items():
        left += places
        sets = [pairs[place][1:] for place in places]
        weights.append(RULES[rule].weights(pool.features[prompt] @ heads_ED.T, sets))
    chance = inclusion_probabilities(mixed(np.concatenate(weights), UNIFORM_SHARE), len(revealed))
    picked = systematic_sample(chance, rng.random(), [int(place) for place in rng.permutation(len(left))])
    return [left[place] for place in picked]


def right_pairs(pool: Pool, prompt: int, head_D: Floats) -> tuple[float, int]:
    """Returns how many of a prompt's pairs the head orders as most votes do, and how many are not tied."""
    scores = pool.features[prompt] @ head_D
    leads = [(scores[i] - scores[j], np.mean(votes) - 0.5) for (i, j), votes in pool.judged[prompt].votes.items()]
    decided = [(float(gap), float(lead)) for gap, lead in leads if lead]
    return float(sum((1 + np.sign(gap * lead)) / 2 for gap, lead in decided)), len(decided)


def measure(pool: Pool, split: int) -> dict[str, Floats]:
    """Returns one split's pairs right by rule [R, T], a mean over replays, and the pairs per held-out prompt [T]."""
    heldout = [n for n, of in enumerate(pool.judged) if is_heldout(of.prompt, HELDOUT_SHARE, split)]
    right = {
        rule: np.mean([replay(pool, rule, 1000 * split + number, heldout) for number in range(NUM_REPLAYS)], axis=0)
        for rule in ("uniform", *COMPARED)
    }
    counts = [right_pairs(pool, n, np.zeros(pool.features[0].shape[1]))[1] for n in heldout]
    return {**right, "compared": np.array(counts, dtype=np.float64)}


def accuracy_difference(measured: dict[str, Floats], rule: str, number: int, seed: int) -> Interval:
    """Returns a rule's accuracy minus that of random pairs after a round, with an interval over held-out prompts."""
    counts_T = measured["compared"]
    used_T = counts_T > 0
    sums_T = (measured[rule] - measured["uniform"])[number][used_T]
    ends = bootstrap_ratio(sums_T, counts_T[used_T], seed=seed, num_resamples=NUM_RESAMPLES, level=0.95)
    return Interval(*ends)


def claims(splits: Sequence[dict[str, Floats]]) -> list[Claim]:
    """Decides for every rule, by Student's interval over splits, whether it beats random pairs after three rounds."""
    size = FIRST_LABELS << (NUM_ROUNDS - 1)
    return [
        decide(
            [
                Contrast(f"{rule} minus uniform, {size} labels", ACCURACY, accuracy_difference(of, rule, -1, split))
                for split, of in enumerate(splits)
            ]
        )
        for rule in COMPARED
    ]


def table(name: str, splits: Sequence[dict[str, Floats]]) -> str:
    """Formats a file's accuracies by number of labels, and its claims."""
    sizes = [FIRST_LABELS << number for number in range(NUM_ROUNDS)]
    lines = [f"| {name} | {' | '.join(f'{size} labels' for size in sizes)} |", f"|---|{'---|' * len(sizes)}"]
    for rule in ("uniform", *COMPARED):
        shares = np.mean([of[rule].sum(axis=1) / of["compared"].sum() for of in splits], axis=0)
        lines.append(f"| {rule} | {' | '.join(f'{share:.3f}' for share in shares)} |")
    lines += ["", "| claim | splits | mean (95%, t over splits) | verdict |", "|---|---|---|---|"]
    for claim in claims(splits):
        by_split = ", ".join(f"{value.mean:+.3f}" for value in claim.by_seed)
        lines.append(f"| {claim.text} | {by_split} | {spread(claim.over_seeds)} | {claim.verdict} |")
    return "\n".join(lines)


def write(folder: Path, name: str, splits: Sequence[dict[str, Floats]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {f"{split}/{key}": value for split, of in enumerate(splits) for key, value in of.items()}
    with atomic_file(folder / f"{name}.npz") as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read(path: Path) -> list[dict[str, Floats]]:
    """Reads what `write` wrote."""
    with np.load(path) as file:
        keys = ("uniform", *COMPARED, "compared")
        return [{key: file[f"{split}/{key}"] for key in keys} for split in range(NUM_SPLITS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="NAME=FILE", help="rankings by people")
    parser.add_argument("--model", default="", help="a language model: a folder, a .gguf file or a hub id")
    parser.add_argument("--measures", type=Path, required=True, help="folder of measures, written or read")
    given = parser.parse_args()
    for file in given.files:
        name, _, path = file.partition("=")
        rankings = read_rankings(RankingsConfig(source=path))
        pool = with_features(judged_prompts(rankings), model_directory(given.model))
        write(given.measures, name, [measure(pool, split) for split in range(NUM_SPLITS)])
    print("\n\n".join(table(path.stem, read(path)) for path in sorted(given.measures.glob("*.npz"))))


if __name__ == "__main__":
    main()
