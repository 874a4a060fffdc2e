"""A published encoder without a head: its tokens and states, and a classifier that learns from few sentences."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from lm.encoder import EncoderModel
from lm.tokenizer import Tokenizer
from lm.weights import load_any
from tests.real.texts import TEXTS

pytestmark = pytest.mark.long

LEARNED = {
    "positive": ["wonderful", "charming", "brilliant", "moving"],
    "negative": ["awful", "dull", "clumsy", "lazy"],
}
HELD_OUT = {"positive": ["delightful", "superb", "excellent"], "negative": ["terrible", "boring", "tedious"]}
FRAMES = ["a {} film from start to finish .", "the acting is {} .", "what a {} way to spend two hours !"]
JOB = """
name = "minilm"

[engine]
precision = "fp32"

[classify]
init_from = "{model}"
task = "sequence"
data = [{{ source = "learned.jsonl" }}]
heldout = [{{ source = "heldout.jsonl" }}]
seq_len = 32
num_epochs = 6
batch = {{ batch_size = 8, micro_batch_size = 8 }}
optimizer = {{ learning_rate = 1e-4 }}
"""


@torch.no_grad()
def test_tokens_and_states_are_those_of_transformers(minilm: Path) -> None:
    ours, theirs = load_any(minilm), transformers.BertModel.from_pretrained(minilm).eval()
    assert type(ours) is EncoderModel
    tokenizer, reference = Tokenizer.load(minilm), transformers.AutoTokenizer.from_pretrained(minilm)
    spelled = tokenizer.encode_plain(TEXTS)
    assert spelled == [reference(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    row = [tokenizer.start_id, *spelled[0][:60], tokenizer.end_id]
    assert (row[0], row[-1]) == (reference.cls_token_id, reference.sep_token_id)
    found = ours.eval().hidden(torch.tensor([row]), None, None, None)
    torch.testing.assert_close(found, theirs(torch.tensor([row])).last_hidden_state, atol=1e-4, rtol=1e-4)


def test_a_classifier_learns_from_few_sentences(minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out sentences have words of praise and blame that no training row has."""
    monkeypatch.chdir(tmp_path)
    for name, words in (("learned", LEARNED), ("heldout", HELD_OUT)):
        pairs = [(frame.format(word), label) for label in words for frame, word in product(FRAMES, words[label])]
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": t, "label": label}) + "\n" for t, label in pairs))
    Path("job.toml").write_text(JOB.format(model=minilm))
    run = run_job(load_job(Path("job.toml")), tmp_path / "runs")
    results = json.loads((run / "classify" / "results.json").read_text())
    assert results["metrics"]["accuracy"]["mean"] >= 0.85
