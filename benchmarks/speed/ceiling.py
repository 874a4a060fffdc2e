"""The hardware's limits: rates of matrix products at the model's own shapes, and of memory.

Shape letters: M rows of the product (tokens), N columns out, K columns in.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.speed.protocol import Task
from lm.decoding import PrepackedLinear, gains
from lm.model import LanguageModel
from lm.native.kernels import weight_gradient
from lm.native.operators import is_available
from lm.weights import load_model

Product = tuple[str, int, int, int]  # "forward", "input" or "weight" (its two gradients), M, N, K
SHORTEST_SECONDS = 0.1  # per measurement
MEMORY_BYTES = 2**28  # far beyond the caches of most machines


class Products:
    """Counts the matrix products of a model's passes."""

    def __init__(self, task: Task) -> None:
        linears = {
            name: module
            for name, module in load_model(task.path / "policy", LanguageModel).named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        self.task = task
        self.head = (linears["head"].out_features, linears["head"].in_features)
        self.inner = [(m.out_features, m.in_features) for name, m in linears.items() if name != "head"]

    def of_row(self) -> Counter[Product]:
        """Returns the products of one step. SFT's loss counts two thirds of the tokens; nothing is padding."""
        task = self.task
        if task.kind == "generate":
            return self._generation()
        tokens = task.batch * task.seq_len
        if task.kind == "train":
            return self._training(tokens, tokens)
        if task.kind == "sft":
            return self._training(tokens, tokens * 2 // 3)
        if task.kind == "reward":
            sequences = [sequence for rows in task.read("comparisons") for sequence in rows]
            mean = sum(map(len, sequences)) / len(sequences)
            return self._training(round(mean * len(task.read("comparisons")[0]) * task.batch), 0)
        tokens, counted = task.batch * (self._prompt_tokens() + task.response_tokens), task.batch * task.response_tokens
        frozen = self._forward(tokens, 0) + self._forward(tokens, counted)  # reward model, reference
        # Policy and value function are measured by the forward passes of the only update (`ppo.kept_passes`).
        return self._generation() + frozen + self._training(tokens, counted) + self._training(tokens, 0)

    def _prompt_tokens(self) -> int:
        return len(self.task.read("prompts")[0])

    def _generation(self) -> Counter[Product]:
        batch = self.task.batch
        products = self._forward(batch * self._prompt_tokens(), batch)
        for _ in range(self.task.response_tokens - 1):
            products += self._forward(batch, batch)
        return products

    def _forward(self, tokens: int, head_tokens: int) -> Counter[Product]:
        products: Counter[Product] = Counter(("forward", tokens, N, K) for N, K in self.inner)
        if head_tokens:
            products["forward", head_tokens, *self.head] += 1
        return products

    def _training(self, tokens: int, head_tokens: int) -> Counter[Product]:
        forward = self._forward(tokens, head_tokens)
        return Counter({(way, *p[1:]): n for p, n in forward.items() for way in ("forward", "input", "weight")})


def seconds_of(product: Product, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Returns the seconds of one product.

    A forward product takes the faster of plain and prepacked weights, a weight's gradient the faster of PyTorch's and
    Heed's kernels.
    """
    way, M, N, K = product
    x_MK, weight_NK, gradient_MN = (torch.randn(shape).to(dtype) for shape in ((M, K), (N, K), (M, N)))
    if way == "input":
        return _mean_seconds(lambda: gradient_MN @ weight_NK, clock)
    if way == "weight":
        plain = _mean_seconds(lambda: gradient_MN.T @ x_MK, clock)
        if dtype != torch.bfloat16 or not is_available():
            return plain
        return min(plain, _mean_seconds(lambda: weight_gradient(gradient_MN, x_MK), clock))
    plain = _mean_seconds(lambda: F.linear(x_MK, weight_NK), clock)
    if not gains(weight_NK):
        return plain
    linear = torch.nn.Linear(K, N, bias=False, dtype=dtype)
    prepared = PrepackedLinear(linear, M)
    return min(plain, _mean_seconds(lambda: prepared(x_MK), clock))


def _mean_seconds(run: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    """Returns the mean over as many runs as fill the shortest measurement."""
    run()
    begun, count = clock(), 0
    while clock() - begun < SHORTEST_SECONDS:
        run()
        count += 1
    return (clock() - begun) / count


def bytes_per_second(clock: Callable[[], float]) -> float:
    """Returns the bytes per second of a copy, read and written."""
    source = torch.ones(MEMORY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    begun, count = clock(), 0
    while clock() - begun < 5 * SHORTEST_SECONDS:
        target.copy_(source)
        count += 1
    return 2 * MEMORY_BYTES * count / (clock() - begun)


def main() -> None:
    """Arguments: "seconds" or "cpu_seconds", and tasks as JSON. Prints the ceiling as one JSON line."""
    clock = time.process_time if sys.argv[1] == "cpu_seconds" else time.perf_counter
    tasks = {name: Task(**values) for name, values in json.loads(sys.argv[2]).items()}
    products = {name: Products(task).of_row() for name, task in tasks.items()}
    distinct = sorted(set().union(*products.values()))
    # Inference mode, so that no product goes through autograd.
    with torch.inference_mode():
        bf16 = {product: seconds_of(product, torch.bfloat16, clock) for product in distinct}
        largest = max(products.values(), key=lambda counts: sum(M * N * K * n for (_, M, N, K), n in counts.items()))
        fp32 = {product: seconds_of(product, torch.float32, clock) for product in largest}
    rates = {
        name: _flops(largest) / sum(n * seconds[product] for product, n in largest.items())
        for name, seconds in (("bf16", bf16), ("fp32", fp32))
    }
    found = {
        "bf16_flops": rates["bf16"],
        "fp32_flops": rates["fp32"],
        "bytes_per_second": bytes_per_second(clock),
        "step_seconds": {name: sum(n * bf16[p] for p, n in counts.items()) for name, counts in products.items()},
    }
    print("\n" + json.dumps(found))


def _flops(products: Counter[Product]) -> float:
    return 2.0 * sum(n * M * N * K for (_, M, N, K), n in products.items())


if __name__ == "__main__":
    main()
