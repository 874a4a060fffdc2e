"""The adapter to lm-evaluation-harness, on tasks with their own data; skipped if lm_eval is not installed."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lm.sequence_logprobs import sequence_logprobs
from lm.tokenizer import Tokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[harness]'")

from evaluation.harness import HeedLM, run_tasks, score_pairs

CHOICE_TASK = """
task: birds_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
TEXT_TASK = """
task: birds_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
WRITE_TASK = """
task: birds_write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "fox"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 5}}
metric_list: [{{metric: exact_match}}]
"""
ROWS = [
    {"question": "The quick brown", "choices": ["fox", "dog"], "answer": 0},
    {"question": "The lazy", "choices": ["bird", "dog sleeps"], "answer": 1},
    {"question": "A bird in the", "choices": ["hand", "bush", "山"], "answer": 0},
]


def requests(*args: tuple[object, ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=arg) for arg in args]


@pytest.fixture(scope="module")
def model(model_folder: Path) -> HeedLM:
    return HeedLM(model_folder)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "birds.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("choice", CHOICE_TASK), ("text", TEXT_TASK), ("write", WRITE_TASK)):
        (folder / f"{name}.yaml").write_text(text.format(path=data))
    return folder


def test_log_likelihoods_are_those_of_sequence_logprobs(model: HeedLM, model_folder: Path) -> None:
    pairs = [("The fox", " sleeps"), ("The fox ", "sleeps"), ("", "The dog"), ("山", "高月")]
    found = model.loglikelihood(requests(*pairs))
    tokenizer = Tokenizer.load(model_folder)
    queries = [
        tokenizer.encode_plain(["The fox"])[0], tokenizer.encode_plain(["The fox"])[0], [tokenizer.end_id],
        tokenizer.encode_plain(["山"])[0],
    ]  # fmt: skip
    answers = tokenizer.encode_plain([" sleeps", " sleeps", "The dog", "高月"])
    expected = sequence_logprobs(model.policy.model, queries, answers, 1.0)
    assert [logprob for logprob, _ in found] == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def test_greedy_is_said_of_what_greedy_decoding_gives(model: HeedLM) -> None:
    (text,) = model.generate_until(requests(("The fox", {"until": [], "max_gen_toks": 4})))
    tokens = model.encode("The fox")
    for _ in range(4):
        tokens.append(int(model.policy.model(torch.tensor([tokens]))[0, -1].argmax()))
    assert text == model.policy.tokenizer.decode(tokens[-4:])
    context = model.encode("The fox")
    found = score_pairs(model.policy.model, [(context, tokens[-4:]), (context, [*tokens[-4:-1], tokens[-1] ^ 1])])
    assert [greedy for _, greedy in found] == [True, False]


def test_what_is_too_long_loses_its_beginning_and_is_counted(model_folder: Path) -> None:
    model = HeedLM(model_folder)
    long = "fox " * 200
    room = model.max_position_embeddings - len(model.encode(" dog"))
    kept = model.encode(long.rstrip())[-room:]
    ((logprob, _),) = model.loglikelihood(requests((long.rstrip(), " dog")))
    expected = sequence_logprobs(model.policy.model, [kept], [model.encode(" dog")], 1.0)
    assert logprob == pytest.approx(expected[0], abs=1e-4)
    assert model.num_shortened == 1
    with pytest.raises(ValueError, match=r"the continuation has \d+ tokens; 1 to 95 were expected"):
        model.loglikelihood(requests(("a", long)))


def test_names_of_special_tokens_are_text_unless_a_template_wrote_them(model_folder: Path) -> None:
    plain, chat = HeedLM(model_folder), HeedLM(model_folder, chat=True)
    assert plain.policy.tokenizer.end_id not in plain.encode("a<|end|>")
    turns = [{"role": "user", "content": "say <|end|>"}]
    written = chat.encode(chat.apply_chat_template(turns))
    assert written == chat.policy.tokenizer.encode_prompt(turns)
    begun = chat.apply_chat_template([*turns, {"role": "assistant", "content": " I"}], add_generation_prompt=False)
    assert chat.encode(begun) == [*written, *chat.encode(" I")]


def test_generation_ends_at_the_given_strings(model: HeedLM) -> None:
    (whole,) = model.generate_until(requests(("The", {"max_gen_toks": 12})))
    middle = whole[len(whole) // 2]
    (cut,) = model.generate_until(requests(("The", {"max_gen_toks": 12, "until": [middle]})))
    assert cut == whole[: whole.index(middle)]
    with pytest.raises(ValueError, match="generation_kwargs num_beams"):
        model.generate_until(requests(("The", {"num_beams": 4})))
    with pytest.raises(ValueError, match="max_gen_toks is 96; 1 to 95 were expected"):
        model.generate_until(requests(("The", {"max_gen_toks": 96})))


def test_the_harness_runs_tasks_of_all_three_kinds(model_folder: Path, tasks: Path) -> None:
    found = run_tasks(model_folder, ["birds_choice", "birds_text", "birds_write"], include=tasks, num_shots=0)
    values = {(row.task, row.metric): row.value for row in found}
    assert values.keys() == {
        ("birds_choice", "acc"), ("birds_text", "bits_per_byte"), ("birds_write", "exact_match"),
    }  # fmt: skip
    assert {row.num_documents for row in found} == {3}
    # By Heed's own functions: the most likely choice, after the space that the harness inserts.
    model = HeedLM(model_folder)
    right = []
    for row in ROWS:
        pairs = [(f"Question: {row['question']}\nAnswer:", f" {choice}") for choice in row["choices"]]  # type: ignore[attr-defined]
        scores = [logprob for logprob, _ in model.loglikelihood(requests(*pairs))]
        right.append(scores.index(max(scores)) == row["answer"])
    assert values["birds_choice", "acc"] == pytest.approx(sum(right) / 3)
    texts = [str(row["question"]) for row in ROWS]
    bits = -sum(model.loglikelihood_rolling(requests(*[(text,) for text in texts]))) / math.log(2)
    assert values["birds_text", "bits_per_byte"] == pytest.approx(bits / sum(map(len, texts)), rel=1e-5)
    with pytest.raises(ValueError, match="no_such_task"):
        run_tasks(model_folder, ["no_such_task"], include=tasks)
