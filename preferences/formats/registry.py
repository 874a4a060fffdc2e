"""Looks up formats by name, and guesses the format of rows."""

from collections.abc import Mapping, Sequence
from itertools import chain, islice

from files.fields import names
from files.rows import Rows
from preferences.formats import annotated, labeling_tools, native, pairs, published
from preferences.formats.labeling_tools import USERS
from preferences.formats.parts import Format, Row, has_fields

AUTO = "auto"
SNIFFED_ROWS = 20


def _never(_row: Row) -> str:
    return ""


def _heed(row: Row) -> str:
    # One labeler's ranking or annotation; a task holds them in `judgments`.
    is_judgment = "ranks" in row or "labeler" in row or "annotation_id" in row
    return "task_id, prompt and responses" if row.keys() >= {*native.REQUIRED} and not is_judgment else ""


def _argilla(row: Row) -> str:
    if row.keys() >= {"fields", "responses", "suggestions"} and isinstance(row["fields"], Mapping):
        return "fields, responses and suggestions (Argilla's records)"
    question = next((name for name in row if name.endswith(USERS) and name.removesuffix(".users") in row), "")
    return f"{question.removesuffix('.users')} and {question} (Argilla's records in columns)" if question else ""


def _label_studio(row: Row) -> str:
    is_task = isinstance(row.get("annotations"), list | tuple) and isinstance(row.get("data"), Mapping)
    return "annotations and data (Label Studio's JSON)" if is_task else ""


_rankings = has_fields("task_id", "responses", "ranks", reason="responses and ranks")
_openai = has_fields("info", "summaries", "choice", reason="info, summaries and choice")
_webgpt = has_fields("answer_0", "answer_1", "score_0", reason="answer_0, answer_1, score_0 and score_1")
_ultrafeedback = has_fields("instruction", "completions", reason="instruction and completions")
_binarized = has_fields(
    "prompt", "chosen", "rejected", "score_chosen", "score_rejected",
    reason="chosen and rejected with score_chosen and score_rejected",
)  # fmt: skip
_helpsteer3 = has_fields(
    "context", "response1", "response2", "overall_preference",
    reason="context, response1, response2 and overall_preference",
)  # fmt: skip
_helpsteer2 = has_fields(
    "prompt", "response_1", "response_2", "preference_strength", reason="response_1, response_2 and preference_strength"
)
_trl_unpaired = has_fields("completion", "label", reason="completion and label (TRL's unpaired type)")
_oasst = has_fields("message_tree_id", "prompt", reason="message_tree_id and prompt")
_pandalm = has_fields(
    "response1", "response2", *published.ANNOTATORS, reason="response1, response2 and annotator1 to 3"
)
_alpacaeval = has_fields(
    "instruction", "output_1", "output_2", "preference", reason="output_1, output_2 and preference"
)
_rewardbench = has_fields(
    "prompt", "chosen", "rejected", "subset", reason="prompt, chosen, rejected and subset", text="chosen"
)
_llmbar = has_fields("input", "output_1", "output_2", "label", reason="input, output_1, output_2 and label")
_arena = has_fields(
    "model_a", "model_b", "winner", "conversation_a", "conversation_b",
    reason="model_a, model_b, winner and both conversations",
)  # fmt: skip

# The first format that recognises the rows wins, so formats with more specific fields come first.
_ALL = (
    Format("heed", "everything in a label store", _heed, native.read_heed, native.write_heed),
    Format("rankings", "what the reward stage reads", _rankings, native.read_rankings, native.write_rankings),
    Format("consensus", "one ranking per task, of all its labelers", _never, None, native.write_consensus),
    Format("argilla", "Argilla 2's records", _argilla, labeling_tools.read_argilla, None),
    Format("label-studio", "Label Studio's tasks", _label_studio, labeling_tools.read_label_studio, None),
    Format("openai", "OpenAI's comparisons of summaries", _openai, published.read_summaries, None),
    Format("webgpt", "WebGPT comparisons", _webgpt, published.read_webgpt, None),
    Format("ultrafeedback", "UltraFeedback", _ultrafeedback, published.read_ultrafeedback, None),
    Format("ultrafeedback_binarized", "UltraFeedback in pairs", _binarized, pairs.read, None),
    Format("helpsteer3", "HelpSteer3", _helpsteer3, published.read_helpsteer3, None),
    Format("helpsteer2", "HelpSteer2's preferences", _helpsteer2, published.read_helpsteer2, None),
    Format("oasst", "Open-Assistant's trees", _oasst, published.read_oasst, None),
    Format("pandalm", "PandaLM's test set", _pandalm, published.read_pandalm, None),
    Format("alpacaeval", "AlpacaEval", _alpacaeval, published.read_alpacaeval, None),
    Format("rewardbench", "RewardBench", _rewardbench, published.read_rewardbench, None),
    Format("llmbar", "LLMBar", _llmbar, published.read_llmbar, None),
    Format("arena", "Chatbot Arena, MT-Bench", _arena, published.read_arena, None),
    Format("hh", "Anthropic's HH-RLHF", pairs.recognise_hh, pairs.read_hh, pairs.write_hh),
    Format("trl_unpaired", "TRL's unpaired labels", _trl_unpaired, pairs.read_unpaired, pairs.write_unpaired),
    Format("trl", "TRL's preferences, conversational or texts", pairs.recognise, pairs.read, pairs.write),
    Format("trl_text", "TRL's preferences, written as texts", _never, pairs.read, pairs.write_text),
    Format("criteria", "ratings by criterion, as in HelpSteer2", _never, None, annotated.write_criteria),
    Format(annotated.TURNS, "labels of each turn", _never, None, annotated.write_turns),
    Format("grouped", "rankings of responses that were rated alone", _never, None, annotated.write_grouped),
    Format("edits", "labelers' versions, preferred over the originals", _never, None, annotated.write_edits),
    Format("demonstrations", "the best responses, for SFT", _never, None, native.write_demonstrations),
    Format("prompts", "the prompts, for PPO", _never, None, native.write_prompts),
)
FORMATS = {form.name: form for form in _ALL}


def format_to_read(name: str) -> Format:
    """Returns a format that can be read. Raises: ValueError for a format that is unknown or write-only."""
    return _named(name, [form for form in _ALL if form.read is not None])


def format_to_write(name: str) -> Format:
    """Returns a format that can be written. Raises: ValueError if it is unknown or cannot represent a store."""
    return _named(name, [form for form in _ALL if form.write is not None])


def _named(name: str, known: Sequence[Format]) -> Format:
    found = next((form for form in known if form.name == name), None)
    if found is None:
        raise ValueError(f"format {name!r}: one of {', '.join(form.name for form in known)} was expected")
    return found


def read_as(name: str, rows: Rows, source: str, *, option: str = "--format") -> tuple[Format, Rows]:
    """Returns the named format (for "auto", what `sniff` finds), and all the rows.

    Raises: ValueError for an unknown format, and as `sniff`.
    """
    if name != AUTO:
        return format_to_read(name), rows
    first = list(islice(rows, SNIFFED_ROWS))
    return sniff(iter(first), source, option=option)[0], chain(first, rows)


def sniff(rows: Rows, source: str, *, option: str = "--format") -> tuple[Format, str]:
    """Returns the format that recognises most of the first rows of `source`, and why.

    Rows that it does not recognise are left to its reader, whose error names the field. Messages refer to `option` as
    the way to choose a format.

    Raises: ValueError if no format recognises any of the first rows, or there are none.
    """
    first = list(islice(rows, SNIFFED_ROWS))
    if not first:
        raise ValueError(f"{source}: there are no rows; at least one was expected")
    found = {form.name: [why for _, row in first if (why := form.recognise(row))] for form in _ALL}
    best = max(_ALL, key=lambda form: len(found[form.name]))
    if found[best.name]:
        return best, f"its rows have {found[best.name][0]}"
    where, row = first[0]
    is_demonstration = {"prompt", "completion"} <= row.keys() or "messages" in row or "conversations" in row
    belongs = "; demonstrations belong in sft.demonstrations" if is_demonstration else ""
    if {"prompt", "responses"} <= row.keys():
        belongs = "; `heed label outputs` makes tasks of rows without task_id"
    raise ValueError(
        f"{where}: no known format has the fields {names(row)}; name one with {option} (a pair has the fields 'prompt',"
        f" 'chosen' and 'rejected'; a task has 'task_id', 'prompt' and 'responses'){belongs}"
    )
