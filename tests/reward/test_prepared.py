"""What ranks are given of rankings, against encoding them in memory."""

import json
import pickle
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import training.data
from benchmarks.pairs import encode_rankings
from dpo.config import DPOConfig
from lm.tokenizer import Tokenizer
from preferences.formats import merging
from preferences.formats.merging import RECENT_TASKS, ImportedLabels
from preferences.statistics.agreement import accuracy_against
from reward.comparisons import SKIPPED, TRUNCATED, encode_unchecked, fit_tasks
from reward.config import RankingsConfig, RewardConfig
from reward.metrics import calibration_sequences
from reward.prepared import ARRAYS, PreparedRankings, ranking_parts, read_judgments, split_of
from tests.rows import jsonl
from training.config import BatchConfig, OptimizerConfig
from training.data import DataConfig
from training.tokens import write_arrays

SEED, CONTEXT = 7, 400


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[RewardConfig, ImportedLabels]:
    """Two labelers, two tasks of every third prompt, long responses."""
    path = tmp_path_factory.mktemp("rankings") / "rankings.jsonl"
    rows = [
        {
            "task_id": f"t{i}/{again}",
            "prompt": [{"role": "user", "content": f"Where is dog {i}?"}],
            "responses": [f"In the bush {again}. " * (8 + i % 3), "Far. " * 30, "Here!"][: 2 + i % 2],
            "ranks": ranks[: 2 + i % 2],
            "labeler": labeler,
        }
        for labeler, ranks in (("ann", [2, 1, 3]), ("bo", [1, 2, 2]))
        for i in range(60)
        for again in range(1 + (i % 3 == 0))
        if labeler == "ann" or i % 4 == 0
    ]
    path.write_text(jsonl(rows))
    config = RewardConfig(
        rankings=RankingsConfig(source=str(path)),
        demonstrations=(DataConfig(source=str(path)),),
        heldout_share=0.3,
        batch=BatchConfig(batch_size=8, micro_batch_size=4),
        optimizer=OptimizerConfig(learning_rate=0.01),
    )
    return config, read_judgments(config.rankings)


@pytest.fixture(scope="module")
def prepared(
    read: tuple[RewardConfig, ImportedLabels], tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> PreparedRankings:
    config, _ = read
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    write_arrays(folder, ARRAYS, partial(ranking_parts, tokenizer, config, SEED, CONTEXT))
    return PreparedRankings(folder, config)


@pytest.mark.parametrize("keeps_end", [True, False])
def test_truncated_responses_of_the_reward_model_keep_their_end_and_those_of_dpo_do_not(
    read: tuple[RewardConfig, ImportedLabels], tokenizer: Tokenizer, tmp_path: Path, keeps_end: bool
) -> None:
    """Scoring ends a truncated response with the end token; a policy must not learn to end in mid-sentence."""
    preferences = DPOConfig(rankings=read[0].rankings, on_overlong="truncate")
    config = read[0].model_copy(update={"on_overlong": "truncate"}) if keeps_end else preferences
    limit, whole = 150, encode_rankings(tokenizer, read[1].rankings, CONTEXT)
    write_arrays(tmp_path / "tokens", ARRAYS, partial(ranking_parts, tokenizer, config, SEED, limit))
    prepared = PreparedRankings(tmp_path / "tokens", config)
    by_task = {c.task_id: c for c in prepared.comparisons([*prepared.split.train, *prepared.split.heldout])}
    num_cut = 0
    for expected in whole:
        for k, (full, found) in enumerate(zip(expected.sequences, by_task[expected.task_id].sequences, strict=True)):
            num_cut += len(full) > limit
            end = [tokenizer.turn_end_id] if keeps_end and len(full) > limit else []
            assert list(found) == [*full[: limit - len(end)], *end][: len(full)]
            prompt_tokens = len(full) - expected.response_tokens[k]
            assert by_task[expected.task_id].response_tokens[k] == len(found) - prompt_tokens
    assert 20 < num_cut < len(whole) * 3


def test_a_task_of_which_no_response_is_left_is_skipped(
    read: tuple[RewardConfig, ImportedLabels], tokenizer: Tokenizer
) -> None:
    """Also that of a single response, as labels of KTO have."""
    first = read[1].rankings[0]
    single = replace(first, responses=first.responses[:1], ranks=(1,), ratings=first.ratings[:1])
    ((_, _, (whole,)),) = encode_unchecked(tokenizer, [("", [single])])
    for kept, fate in ((1, TRUNCATED), (0, SKIPPED)):
        limit = len(whole.tokens) - whole.response_tokens + kept
        ((_, sequences, found),) = fit_tasks(tokenizer, [("", [single])], limit, "truncate", "dpo", keeps_end=False)
        assert (found, [one.response_tokens for one in sequences]) == (fate, [1] * kept)


def test_demonstrations_of_which_none_fits_are_refused(
    read: tuple[RewardConfig, ImportedLabels], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "said.jsonl").write_text(jsonl([{"prompt": "Hello?", "completion": "Hello!"}]))
    named = (DataConfig(source=str(tmp_path / "said.jsonl")),)
    config = read[0].model_copy(update={"on_overlong": "skip", "demonstrations": named})
    with pytest.raises(ValueError, match=r"reward\.demonstrations: none of the first 512 conversations fits"):
        calibration_sequences(config, tokenizer, 3)


@pytest.mark.parametrize("side", ["train", "heldout"])
def test_comparisons_are_those_of_the_texts(
    read: tuple[RewardConfig, ImportedLabels], prepared: PreparedRankings, tokenizer: Tokenizer, side: str
) -> None:
    config, found = read
    split, weights = split_of(found.rankings, config, SEED), {("overall", "bo"): 0.5}
    expected = encode_rankings(tokenizer, getattr(split, side), CONTEXT, objectives=split.objectives, weights=weights)
    ours = prepared.comparisons(getattr(prepared.split, side), weights)
    assert len(ours) == len(expected) > 10
    for one, other in zip(ours, expected, strict=True):
        assert [list(sequence) for sequence in one.sequences] == [list(sequence) for sequence in other.sequences]
        assert (one.task_id, one.verdicts, one.objective) == (other.task_id, other.verdicts, other.objective)
        assert one.response_tokens == other.response_tokens


def test_statistics_need_no_texts(read: tuple[RewardConfig, ImportedLabels], prepared: PreparedRankings) -> None:
    """The interval is over prompts, which have hashes in place of texts."""
    config, found = read
    heldout = split_of(found.rankings, config, SEED).heldout
    scores = {ranking.task_id: [float(len(text)) for text in ranking.responses] for ranking in heldout}
    assert accuracy_against(prepared.split.heldout, scores) == accuracy_against(heldout, scores)
    assert len({ranking.prompt for ranking in heldout}) < len({ranking.task_id for ranking in heldout})


def test_a_rank_gets_no_texts_and_keeps_no_tokens(prepared: PreparedRankings) -> None:
    sent = pickle.dumps(prepared)
    assert b"Where is" not in sent
    assert b"bush" not in sent
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        comparisons = pickle.loads(sent).comparisons(prepared.split.train)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    sequences = [sequence for comparison in comparisons for sequence in comparison.sequences]
    # Objects of a fixed size per sequence, however long it is. As tuples of numbers these were 47 bytes per token.
    assert sum(map(len, sequences)) > 50 * len(sequences)
    assert kept < 1000 * len(sequences)


KEPT, CHUNK = 128, 128  # instead of thousands


def keep_and_write_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows fill what is kept in memory while a file is read, and what is written at once."""
    monkeypatch.setattr(merging, "RECENT_TASKS", KEPT)
    monkeypatch.setattr(training.tokens.chunks, "__defaults__", (CHUNK,))


def write_pairs(path: Path, number: int) -> RewardConfig:
    with path.open("w") as file:
        for row in range(number):
            pair = {"prompt": f"Where is dog {row}?", "chosen": f"In bush {row}.", "rejected": "Far."}
            file.write(json.dumps(pair) + "\n")
    return RewardConfig(
        rankings=RankingsConfig(source=str(path)),
        batch=BatchConfig(batch_size=8, micro_batch_size=4),
        optimizer=OptimizerConfig(learning_rate=0.01),
    )


def test_pairs_are_read_once(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes pairs that were put aside while later rows were read. Their order is kept."""
    keep_and_write_less(monkeypatch)
    number, read = KEPT + 2 * CHUNK, list[str]()
    config, of_source = write_pairs(tmp_path / "pairs.jsonl", number), training.data.read_source

    def noted(*args: Any, **options: Any) -> Iterator[Any]:
        for where, row in of_source(*args, **options):
            read.append(where)
            yield where, row

    monkeypatch.setattr(training.data, "read_source", noted)
    found = read_judgments(config.rankings)
    assert (len(read), len(found.found_tasks)) == (number, number)
    prompts = [task[0].prompt[0].content for _, task in found.ranked_tasks()]
    assert prompts == [f"Where is dog {row}?" for row in range(number)]
    write_arrays(tmp_path / "tokens", ARRAYS, partial(ranking_parts, tokenizer, config, SEED, CONTEXT))
    assert len(read) == 2 * number, "once more, with the tokens"
    prepared = PreparedRankings(tmp_path / "tokens", config)
    assert sum(prepared.counts().values()) == len(prepared.split.train) + len(prepared.split.heldout) == number
    assert len(read) == 2 * number
    resumed = list(ranking_parts(tokenizer, config, SEED, CONTEXT, CHUNK))
    assert sum(part.num_rows for part in resumed) == number - CHUNK
    assert not any("warnings" in part.arrays for part in resumed), "they were written with the first tasks"


def test_a_task_that_was_put_aside_is_merged_with_a_later_row(tmp_path: Path) -> None:
    config = write_pairs(tmp_path / "pairs.jsonl", RECENT_TASKS + 10)
    text = (tmp_path / "pairs.jsonl").read_text()
    first = json.loads(text.splitlines()[0])
    (tmp_path / "pairs.jsonl").write_text(text + json.dumps(first) + "\n")
    found = read_judgments(config.rankings)
    (warning,) = found.report.warnings
    assert (warning.kind, warning.where) == ("row seen twice", f"{tmp_path}/pairs.jsonl: line {RECENT_TASKS + 11}")
    assert len(found.rankings) == RECENT_TASKS + 10


def test_memory_of_pairs_grows_by_little_per_pair(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python objects, a pair of short texts takes about 4,000 bytes."""

    def peak(number: int) -> int:
        config = write_pairs(tmp_path / f"{number}.jsonl", number)
        tracemalloc.start()
        write_arrays(tmp_path / f"tokens-{number}", ARRAYS, partial(ranking_parts, tokenizer, config, SEED, CONTEXT))
        counts = PreparedRankings(tmp_path / f"tokens-{number}", config).counts()
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sum(counts.values()) == number
        return highest

    keep_and_write_less(monkeypatch)
    peak(10)  # what is imported or made once
    # In both, what is kept or written at once is full.
    few, many = peak(4 * CHUNK), peak(12 * CHUNK)
    assert (many - few) / (8 * CHUNK) < 1_500
