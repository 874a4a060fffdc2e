"""Measures what many prompts or preference pairs cost the head of a job before training starts: CPU seconds and memory.

    python -m benchmarks.million_rows prompts 1000000

Writes a file of that many prompts of 12 words, or pairs with responses of 6 words, and runs `heed run` on it until the
stage has started. The peak resident size and the CPU seconds are those of the process that ran the command. Its workers
are other processes and do not count.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model

SHAPE = ModelConfig(
    vocab_size=400,
    max_position_embeddings=256,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    intermediate_size=32,
)
WORDS = [
    "".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=3 + number % 6)) for number in range(5000)
]

PROMPTS = """
[ppo]
init_from = "model"
prompts = { source = "rows.jsonl" }
reward = { kind = "function", function = "reward.py:length" }
num_iterations = 1
rollout_batch_size = 4
minibatch = { batch_size = 4, micro_batch_size = 4 }
max_new_tokens = 4
policy_optimizer = { learning_rate = 1e-5 }
advantage = { kind = "leave_one_out", samples_per_prompt = 2 }
"""
PAIRS = """
[reward]
init_from = "model"
rankings = { source = "rows.jsonl" }
batch = { batch_size = 64, micro_batch_size = 64 }
optimizer = { learning_rate = 1e-5 }
"""
REWARD = """
def length(prompts, responses):
    return [float(len(response)) for response in responses]
"""


def rows(kind: str, number: int) -> Iterator[dict[str, str]]:
    """Yields rows of random words."""
    draw = random.Random(1)

    def text(num_words: int) -> str:
        return " ".join(draw.choices(WORDS, k=num_words))

    for _ in range(number):
        yield {"prompt": text(12)} | ({} if kind == "prompts" else {"chosen": text(6), "rejected": text(6)})


def write_job(folder: Path, kind: str, number: int) -> None:
    """Writes the rows, a tiny model, and a job that trains the model on the rows."""
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(kind, number))
    tokenizer = Tokenizer.train((row["prompt"] for row in rows(kind, 2000)), SHAPE.vocab_size, "chat")
    model = LanguageModel(SHAPE)
    init_weights(model, 1)
    save_model(folder / "model", model, model.state_dict(), tokenizer)
    (folder / "reward.py").write_text(REWARD)
    (folder / "job.toml").write_text('name = "rows"\n' + (PROMPTS if kind == "prompts" else PAIRS))


def measure(folder: Path) -> tuple[float, float]:
    """Returns CPU seconds and peak MiB of `heed run` up to the line that reports the start of a stage.

    Raises: RuntimeError with the run's output if there is no such line.
    """
    command = [sys.executable, "-m", "heed", "run", "job.toml"]
    run = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout is not None
    lines = list[str]()
    try:
        for line in run.stdout:
            lines.append(line)
            if ": starts from " in line:
                status = Path(f"/proc/{run.pid}/status").read_text().splitlines()
                (peak,) = (int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))
                ticks = Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), peak
    finally:
        run.send_signal(signal.SIGTERM)
        run.communicate()
    raise RuntimeError("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("prompts", "pairs"))
    parser.add_argument("number", type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_job(Path(name), given.kind, given.number)
        seconds, peak = measure(Path(name))
        print(f"{given.number:,} {given.kind}: {seconds:.1f} CPU s, peak {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
