"""How many comparisons a stage will learn from, and how long they are, before anything runs."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lm.tokenizer import Tokenizer
from reward.comparisons import Answer, RankingsConfig, encode_answers, place_of, rankings_by_task, read_judgments
from reward.config import ComparisonsConfig
from stages.planner import Planner
from stages.run import StageRun
from stages.sizes import Lengths, RowSample

if TYPE_CHECKING:
    from preferences.formats.merging import Found


def comparison_steps(planner: Planner, config: ComparisonsConfig) -> tuple[int, int]:
    """Steps of training, and the most responses that a comparison has."""
    num_tasks, num_responses = _num_tasks(planner, config.rankings)
    planner.sizes.assume("assumes one ranking per task (several rankings of a task are one comparison)")
    steps = config.num_epochs * num_tasks * (1 - config.heldout_share) / config.batch.batch_size
    return max(1, round(steps)), num_responses


def _num_tasks(planner: Planner, rankings: RankingsConfig) -> tuple[int, int]:
    """Tasks of a file that is here (a row may hold several, and several rows one), and the most responses of one."""

    def count() -> tuple[int, int]:
        tasks = read_judgments(rankings).tasks
        return len(tasks), max(len(task.responses) for task in tasks.values())

    if Path(rankings.source).exists():
        return planner.sizes.measures.get(f"tasks {rankings.model_dump_json()}", count)
    written = planner.sizes.stage_size(rankings.source)
    if written is None:
        planner.sizes.assume("assumes two responses per task")
    return planner.sizes.num_rows(rankings), 2 if written is None else written.responses_per_row


def comparison_lengths(
    planner: Planner, config: ComparisonsConfig, tokenizer: Callable[[StageRun], Tokenizer], context: int
) -> Lengths:
    """The lengths of prompts with responses, of which a model with this context reads no more, or a bound on them.
    Which of the two is reported.
    """

    def measure(known: Tokenizer) -> Lengths:
        templated = known.with_template(config.chat_template)
        return ranking_lengths(templated, read_judgments(config.rankings), context)

    found = planner.measured((config.rankings,), "prompts with a response", tokenizer, measure)
    return planner.bound(config.rankings, 0) if found is None else found


def ranking_lengths(tokenizer: Tokenizer, judgments: "Found", most_tokens: int) -> Lengths:
    """The lengths of each response with its prompt, of which at most `most_tokens` count.

    Raises: ValueError naming file and line of a conversation that the chat template refuses.
    """
    sample, places = RowSample[Answer](), judgments.places
    for task in rankings_by_task(judgments.rankings):
        where, prompt = place_of(task, places), task[0].prompt
        prompt_bytes = sum(len(message.content.encode()) for message in prompt)
        for response in task[0].responses:
            sample.add((where, prompt, response), prompt_bytes + len(response.encode()))

    def count(answers: Sequence[Answer]) -> Iterator[tuple[int, int]]:
        return ((len(of.tokens), of.response_tokens) for of in encode_answers(tokenizer, answers))

    return sample.lengths(count, most_tokens)
