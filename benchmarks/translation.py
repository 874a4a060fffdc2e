"""Translates held-out sources with an encoder-decoder, greedily and by beam search, and scores both by BLEU and chrF:

    python -m benchmarks.translation runs/translation/sft/model runs/translation/world/data/translations_heldout.jsonl

The scores are sacrebleu's (arXiv 1804.08771), with its default tokenization, so they compare with published ones that
have the same signature. BLEU is Papineni et al. 2002, ACL P02-1040; chrF is Popović 2015, W15-3049, with β = 2.

Shape letters: N resamples of the sentences, C sentences, S statistics of all systems.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from files.atomic import write_jsonl
from lm.encoder import EncoderDecoder
from lm.generation import generate
from lm.sampling import Choice
from lm.search import beam_search
from lm.source import load_for_inference
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder
from preferences.statistics.estimates import LEVEL, Floats, Interval
from preferences.statistics.intervals import percentiles, resampled_sums, share_interval
from stages.progress import results_console

NUM_RESAMPLES = 2_000


@dataclass(frozen=True)
class Scores:
    """BLEU and chrF from 0 to 100, and the share of translations that equal their reference. Higher is better."""

    bleu: Interval
    chrf: Interval
    exact_match: Interval


@dataclass(frozen=True)
class TranslationResults:
    """Scores of greedy decoding and of beam search, with 95% intervals over sentences.

    `beam_above_greedy` is their difference in paired resamples of the sentences. `signatures` are sacrebleu's.
    """

    num_sentences: int
    num_beams: int
    greedy: Scores
    beam: Scores
    beam_above_greedy: Scores
    signatures: tuple[str, ...]


def translate(
    folder: Path, pairs: Sequence[tuple[str, str]], num_beams: int, max_new_tokens: int
) -> list[dict[str, str]]:
    """Translate each pair's source with the model in `folder`, greedily and with `num_beams` beams.

    Returns a row {"source", "reference", "greedy", "beam"} per pair. Raises: ValueError as `generate`.
    """
    model, tokenizer = load_for_inference(ModelFolder(folder, EncoderDecoder)), Tokenizer.load(folder)
    sources = [tokenizer.encode_prompt([{"role": "user", "content": source}]) for source, _ in pairs]
    by_length = sorted(range(len(sources)), key=lambda row: len(sources[row]))
    generated = generate(
        model,
        [[tokenizer.target_start_id]] * len(sources),
        sources=[sources[row] for row in by_length],
        max_new_tokens=max_new_tokens,
        end_ids=tokenizer.end_ids,
        choice=Choice(temperature=0),
        seeds=[0] * len(sources),
    )
    greedy = dict(zip(by_length, generated.responses, strict=True))
    rows = []
    for row, (source, reference) in enumerate(pairs):
        best, *_ = beam_search(
            model,
            sources[row],
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            start_id=tokenizer.target_start_id,
            end_ids=tokenizer.end_ids,
        )
        written = {"greedy": greedy[row], "beam": best.response}
        texts = {name: tokenizer.decode(tokens).strip() for name, tokens in written.items()}
        rows.append({"source": source, "reference": reference} | texts)
    return rows


def score_translations(
    references: Sequence[str], greedy: Sequence[str], beam: Sequence[str], num_beams: int, seed: int
) -> TranslationResults:
    """Score both decodings of the same sentences, each against its one reference."""
    metrics = BLEU(), CHRF()
    bleus, chrfs = (_corpus_scores(metric, references, (greedy, beam), seed) for metric in metrics)
    exact_C2 = np.array([[g == r, b == r] for g, b, r in zip(greedy, beam, references, strict=True)], dtype=np.float64)
    exact_N2 = resampled_sums(exact_C2, seed=seed, num_resamples=NUM_RESAMPLES) / len(references)
    difference = _interval(float(exact_C2[:, 1].mean() - exact_C2[:, 0].mean()), exact_N2[:, 1] - exact_N2[:, 0])
    exact = share_interval(exact_C2[:, 0]), share_interval(exact_C2[:, 1]), difference
    greedy_scores, beam_scores, above = (Scores(*row) for row in zip(bleus, chrfs, exact, strict=True))
    signatures = tuple(f"{metric.__class__.__name__}|{metric.get_signature()}" for metric in metrics)
    return TranslationResults(len(references), num_beams, greedy_scores, beam_scores, above, signatures)


def _corpus_scores(
    metric: BLEU | CHRF, references: Sequence[str], systems: tuple[Sequence[str], Sequence[str]], seed: int
) -> tuple[Interval, Interval, Interval]:
    """Returns a metric of two systems' translations, and of the second above the first, by paired bootstrap.

    A corpus's score is a function of sums of the sentences' n-gram counts, so a resample needs only new sums (Koehn
    2004, W04-3250).
    """
    first_CS, second_CS = (
        np.array(metric._extract_corpus_statistics(hypotheses, [references]), dtype=np.float64)
        for hypotheses in systems
    )
    both_CS = np.concatenate([first_CS, second_CS], axis=1)

    def score(sums_S: Floats) -> float:
        return float(metric._compute_score_from_stats(sums_S.round().astype(int).tolist()).score)

    def scores(sums_S: Floats) -> tuple[float, float]:
        first_S, second_S = np.split(sums_S, 2)
        return score(first_S), score(second_S)

    first, second = scores(both_CS.sum(axis=0))
    resampled_NS = resampled_sums(both_CS, seed=seed, num_resamples=NUM_RESAMPLES)
    first_N, second_N = np.array([scores(sums_S) for sums_S in resampled_NS]).T
    return _interval(first, first_N), _interval(second, second_N), _interval(second - first, second_N - first_N)


def _interval(value: float, resampled_N: Floats) -> Interval:
    return Interval(value, *percentiles(resampled_N, LEVEL))


def table_of(results: TranslationResults) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("decoding", "BLEU", "chrF", "exact match, %"):
        table.add_column(column)
    named = {
        "greedy": results.greedy,
        f"{results.num_beams} beams": results.beam,
        "beams - greedy": results.beam_above_greedy,
    }
    for name, scores in named.items():
        table.add_row(name, _cell(scores.bleu), _cell(scores.chrf), _cell(scores.exact_match, 100))
    return table


def _cell(interval: Interval, unit: float = 1) -> str:
    value, low, high = (f"{unit * end:.2f}" for end in (interval.mean, interval.low, interval.high))
    return f"{value} ({low} to {high})"


def main(
    model: Annotated[Path, typer.Argument(help="The model's directory.")],
    pairs: Annotated[Path, typer.Argument(help='A JSONL file of {"prompt": source, "completion": reference}.')],
    beams: Annotated[int, typer.Option(min=1, help="Beams of the beam search.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of a translation.")] = 63,
    out: Annotated[Path | None, typer.Option(help="A JSONL file for the translations.")] = None,
) -> None:
    """Print BLEU, chrF and the share of exact translations, with 95% intervals over sentences."""
    given = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    rows = translate(model, [(row["prompt"], row["completion"]) for row in given], beams, max_new_tokens)
    if out is not None:
        write_jsonl(out, rows)
    references, greedy, beam = ([row[name] for row in rows] for name in ("reference", "greedy", "beam"))
    results = score_translations(references, greedy, beam, beams, seed=0)
    results_console().print(table_of(results))
    results_console().print(f"{results.num_sentences} sentences; {'; '.join(results.signatures)}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
