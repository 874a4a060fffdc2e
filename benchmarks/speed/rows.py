"""The rows of the table, the contenders in each, and how much work each process does."""

from dataclasses import dataclass

from benchmarks.speed.protocol import Task
from benchmarks.speed.work import Sizes

HEED = "Heed"
OWN_MODULE = "benchmarks.speed.own"


@dataclass(frozen=True)
class Peer:
    """A library to compare with: a measuring module, and the environment that it runs in."""

    name: str
    module: str
    environment: str


TRANSFORMERS = Peer("transformers", "benchmarks.speed.peer_transformers", "trl")
TRL = Peer("TRL", "benchmarks.speed.peer_trl", "trl")
VLLM = Peer("vLLM", "benchmarks.speed.peer_vllm", "vllm")


@dataclass(frozen=True)
class Row:
    """`batch` is as in `Task`; `aims` are the target ratios, in the order of the peers."""

    name: str
    kind: str
    batch: int
    unit: str
    peers: tuple[Peer, ...]
    aims: tuple[float, ...]
    warmup_steps: int
    timed_steps: int

    def task(self, folder: str, sizes: Sizes) -> Task:
        return Task(
            self.kind,
            folder,
            self.batch,
            max(1, self.batch // 4),
            sizes.seq_len,
            sizes.response_tokens,
            self.warmup_steps,
            self.timed_steps,
        )


ROWS = (
    Row("generation, 64 sequences", "generate", 64, "tokens", (TRANSFORMERS, VLLM), (4.0, 3.5), 1, 3),
    Row("generation, 128 sequences", "generate", 128, "tokens", (TRANSFORMERS, VLLM), (4.0, 3.5), 1, 3),
    Row("training step, 8 x 256 tokens", "train", 8, "tokens", (TRANSFORMERS,), (2.5,), 2, 6),
    Row("PPO iteration, 64 prompts", "ppo", 64, "response tokens", (TRL,), (5.0,), 2, 3),
    Row("reward model, 8 comparisons of 4", "reward", 8, "comparisons", (TRL,), (2.0,), 1, 4),
    Row("SFT, 8 packed rows of 256", "sft", 8, "tokens", (TRL,), (1.5,), 2, 6),
)
