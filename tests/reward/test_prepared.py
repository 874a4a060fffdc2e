"""What ranks are given of rankings, against encoding them in memory."""

import json
import pickle
import tracemalloc
from functools import partial

import pytest

from lm.tokenizer import Tokenizer
from preferences.formats.merging import Found
from preferences.statistics.agreement import accuracy_against
from reward.comparisons import RankingsConfig, encode_rankings, read_judgments
from reward.config import RewardConfig
from reward.prepared import ARRAYS, PreparedRankings, ranking_parts, split_of
from training.config import BatchConfig, OptimizerConfig
from training.data import DataConfig
from training.tokens import write_arrays

SEED, CONTEXT = 7, 400


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[RewardConfig, Found]:
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
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    read: tuple[RewardConfig, Found], tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> PreparedRankings:
    config, _ = read
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    write_arrays(folder, ARRAYS, partial(ranking_parts, tokenizer, config, SEED, CONTEXT))
    return PreparedRankings(folder, config)


@pytest.mark.parametrize("side", ["train", "heldout"])
def test_comparisons_are_those_of_the_texts(
    read: tuple[RewardConfig, Found], prepared: PreparedRankings, tokenizer: Tokenizer, side: str
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


def test_statistics_need_no_texts(read: tuple[RewardConfig, Found], prepared: PreparedRankings) -> None:
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
