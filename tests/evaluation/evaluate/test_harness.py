"""The adapter to lm-evaluation-harness, on tasks with their own data; skipped if lm_eval is not installed."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lm.sequence_logprobs import sequence_logprobs
from lm.tokenizer import Tokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[harness]'")

from evaluation.harness import HeedLM, score_pairs
from evaluation.measures.kl import Policy

Call = Callable[..., tuple[int, str]]

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
    return HeedLM(Policy.load(model_folder))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "birds.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("choice", CHOICE_TASK), ("text", TEXT_TASK), ("write", WRITE_TASK)):
        (folder / f"{name}.yaml").write_text(text.format(path=data))
    (folder / "flock.yaml").write_text("group: flock\ntask: [birds_choice, birds_write]\n")
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
    model = HeedLM(Policy.load(model_folder))
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
    plain, chat = HeedLM(Policy.load(model_folder)), HeedLM(Policy.load(model_folder), chat=True)
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


def test_tasks_are_evaluated_with_intervals_and_in_pairs_and_asked_once(
    heed_main: Call, models: Path, tasks: Path, tmp_path: Path
) -> None:
    names = ("birds_choice", "birds_write")
    suites = [
        text for name in names for text in ("--suite", f"harness:{name}:0", "--data", f"harness:{name}:0={tasks}")
    ]
    both = [f"a={models / 'one' / 'model'}", f"b={models / 'two' / 'model'}"]
    command = ["evaluate", *both, *suites, "--out", str(tmp_path / "out")]
    code, shown = heed_main(*command)
    assert code == 0, shown
    assert "a: harness:birds_choice:0" in shown
    assert "birds_choice, from logs of lm-evaluation-harness" in " ".join(shown.split())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = {suite["suite"]: suite["statistics"] for suite in report["suites"]}
    assert list(found) == list(names)
    values = {(v["model"], v["measure"]): v["value"]["mean"] for one in found.values() for v in one["values"]}
    for name, folder in (("a", "one"), ("b", "two")):  # by Heed's own functions
        model = HeedLM(Policy.load(models / folder / "model"))
        right = []
        for row in ROWS:
            asked = f"Question: {row['question']}\nAnswer:"
            pairs = [(asked, f" {choice}") for choice in row["choices"]]  # type: ignore[attr-defined]
            scores = [logprob for logprob, _ in model.loglikelihood(requests(*pairs))]
            right.append(scores.index(max(scores)) == row["answer"])
        assert values[name, "acc"] == pytest.approx(sum(right) / len(ROWS))
    assert {(d["a"], d["b"], d["num_items"]) for d in found["birds_choice"]["differences"]} == {("a", "b", len(ROWS))}
    again = ["--fail-if", "b worse than a in acc by .9"]
    code, shown = heed_main(*command, *again)  # from the stored logs
    assert code in (0, 2)
    assert "a: harness:birds_choice:0" not in shown
    assert len(list((tmp_path / "harness").iterdir())) == 2 * len(names)
    fewer = ["--suite", "harness:flock", "--data", str(tasks), "--max-items", "2", "--out", str(tmp_path / "fewer")]
    code, shown = heed_main("evaluate", both[0], *fewer)
    assert code == 0, shown
    (suite,) = json.loads((tmp_path / "fewer" / "report.json").read_text())["suites"]
    assert (suite["suite"], suite["statistics"]["num_items"]) == ("flock", 2)
    assert {value["group"] for value in suite["statistics"]["values"]} == {"", "birds_choice", "birds_write"}


def test_data_that_cannot_be_had_is_one_line(
    heed_main: Call, models: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("socket.create_connection", away)
    for name in ("all_proxy", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub = CHOICE_TASK.format(path="x").replace("birds_choice", "far").replace(": json", ": nobody/no-birds")
    (tmp_path / "far.yaml").write_text(hub)
    (tmp_path / "group.yaml").write_text("group: flock\ntask: [far]\n")
    command = ["evaluate", str(models / "one" / "model"), "--out", str(tmp_path / "out"), "--suite"]
    for name in ("far", "flock"):
        code, shown = heed_main(*command, f"harness:{name}", "--data", str(tmp_path))
        assert code == 2
        assert f"--suite harness:{name}: its data, nobody/no-birds: the hub cannot be reached" in " ".join(
            shown.split()
        )
    for suite, said in (
        ("harness:birds_choice:many", "harness:TASK, harness:TASK:SHOTS or harness:TASK:chat was expected"),
        ("harness:no_such_task", "--suite harness:no_such_task: not found in"),
    ):
        code, shown = heed_main(*command, suite, "--data", str(tasks))
        assert code == 2
        assert said in " ".join(shown.split())
    code, shown = heed_main(*command, "harness:birds_choice", "--suite", "gsm8k", "--data", str(tasks))
    assert "no other suites, --judge, --baseline or --samples were expected" in " ".join(shown.split())
    assert not list((tmp_path / "harness").iterdir())
