"""Measures how seconds grow with batch, length and model size: `python -m benchmarks.speed growth`.

It times a training step (bf16 if the CPU has matrix units, AdamW, Heed's engine) and generation, varying one of the
three while the other two stay fixed. Seconds grow as size to the power of an exponent, which is fitted on log axes. An
exponent of 1 means proportional, and less means that part of the cost does not grow. The plot goes to docs/growth.svg.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from scipy import stats

from benchmarks.speed.environments import ROOT
from benchmarks.speed.table import taken_on
from lm.config import ModelConfig
from lm.generation import generate
from lm.model import LanguageModel, count_parameters
from lm.sampling import Choice
from lm.source import RandomInit, load, on_meta
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine
from training.objectives import CausalLMObjective

PLOT = ROOT / "docs" / "growth.svg"
CONFIDENCE = 0.95
NO_END: tuple[int, ...] = ()  # no token ends a response
PROMPT_TOKENS = 16
VOCAB_SIZE = 8192
ADAMW = OptimizerConfig(learning_rate=1e-4, schedule="constant")


@dataclass(frozen=True)
class Point:
    """One measurement: the number of rows, their tokens (for generation, of the response), and the model's shape."""

    width: int
    num_layers: int
    batch: int
    tokens: int

    @property
    def shape(self) -> ModelConfig:
        heads = max(1, self.width // 64)
        return ModelConfig(
            vocab_size=VOCAB_SIZE, max_position_embeddings=4096, hidden_size=self.width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=heads, num_key_value_heads=heads, head_dim=self.width // heads,
            intermediate_size=4 * self.width, mlp="relu2",
        )  # fmt: skip


# Hidden size and layers per model size: 1.2M, 3.3M, 10M, 29M, 98M and 315M parameters, with a tied head.
SIZES = ((96, 4), (192, 4), (320, 6), (512, 8), (768, 13), (1024, 24))
MIDDLE = (320, 6)
SWEEPS: dict[str, dict[str, list[Point]]] = {
    "training step": {
        "rows": [Point(*MIDDLE, batch, 128) for batch in (1, 2, 4, 8, 16, 32)],
        "tokens a row": [Point(*MIDDLE, 4, tokens) for tokens in (32, 64, 128, 256, 512, 1024)],
        "parameters": [Point(*size, 4, 128) for size in SIZES],
    },
    "generation": {
        "rows": [Point(*MIDDLE, batch, 32) for batch in (1, 2, 4, 8, 16, 32, 64, 128)],
        "tokens a row": [Point(*MIDDLE, 16, tokens) for tokens in (16, 32, 64, 128, 256, 512)],
        "parameters": [Point(*size, 16, 16) for size in SIZES],
    },
}


def training_step(point: Point, rounds: int, clock: Callable[[], float]) -> list[float]:
    """Returns the seconds of each of `rounds` steps, after a first step that is not counted."""
    engine = Engine(
        RandomInit(lambda: LanguageModel(point.shape), seed=0), ADAMW, EngineConfig(trackers=()),
        world_size=1, micro_batch=point.batch,
    )  # fmt: skip
    drawn = np.random.default_rng(0).integers(8, VOCAB_SIZE, (point.batch, point.tokens + 1), dtype=np.int32)
    objective, rows = CausalLMObjective(drawn), np.arange(point.batch)

    def step() -> None:
        count = objective.count(rows)
        engine.accumulate([rows], lambda rows: (objective.loss(engine.model, rows, engine.device)[0] / count, {}))
        engine.step()

    seconds = timed(step, rounds, clock)
    engine.close()
    return seconds


def generation(point: Point, rounds: int, clock: Callable[[], float]) -> list[float]:
    """Returns the seconds of each of `rounds` batches of responses, after a first batch that is not counted."""
    dtype = torch.bfloat16 if EngineConfig().resolved_precision() == "bf16" else torch.float32
    model = load(RandomInit(lambda: LanguageModel(point.shape), seed=0)).to(dtype).eval()
    prompts = np.random.default_rng(0).integers(8, VOCAB_SIZE, (point.batch, PROMPT_TOKENS)).tolist()

    def sample() -> None:
        generate(
            model, prompts, max_new_tokens=point.tokens, end_ids=NO_END, choice=Choice(), seeds=range(point.batch),
            max_rows=point.batch,
        )  # fmt: skip

    return timed(sample, rounds, clock)


def timed(work: Callable[[], None], rounds: int, clock: Callable[[], float]) -> list[float]:
    work()
    seconds = []
    for _ in range(rounds):
        begun = clock()
        work()
        seconds.append(clock() - begun)
    return seconds


WORKS = {"training step": training_step, "generation": generation}


def size_of(axis: str, point: Point) -> int:
    """Returns the number that a sweep varies."""
    if axis == "parameters":
        return count_parameters([on_meta(lambda: LanguageModel(point.shape))])
    return point.batch if axis == "rows" else point.tokens


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """Returns the exponent b of seconds = a · size^b by least squares on logarithms, with Student's interval.

    Its width reflects how far the points lie from a straight line, which is more often curvature than noise.
    Raises: ValueError for fewer than three points.
    """
    if len(sizes) < 3:
        raise ValueError(f"{len(sizes)} points; at least 3 were expected")
    line = stats.linregress(np.log(sizes), np.log(seconds))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(sizes) - 2) * line.stderr)
    exponent = float(line.slope)
    return {
        "exponent": exponent,
        "lower": exponent - half,
        "upper": exponent + half,
        "scale": float(np.exp(line.intercept)),
    }


def sweep(work: str, axis: str, points: Sequence[Point], rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    sizes = [size_of(axis, point) for point in points]
    seconds = []
    for size, point in zip(sizes, points, strict=True):
        seconds.append(WORKS[work](point, rounds, clock))
        print(json.dumps({work: {axis: size}, "seconds": seconds[-1]}), file=sys.stderr, flush=True)
    middles = [median(runs) for runs in seconds]
    return {"sizes": sizes, "seconds": seconds, **fit(sizes, middles), "upper_half": upper_half(sizes, middles)}


def upper_half(sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """Returns the fit of the larger half (at least three points), where costs that do not grow weigh least."""
    start = min(len(sizes) // 2, len(sizes) - 3)
    return fit(sizes[start:], seconds[start:])


def measure(seconds: str, rounds: int) -> dict[str, Any]:
    clock = time.process_time if seconds == "cpu_seconds" else time.perf_counter
    swept = {
        work: {axis: sweep(work, axis, points, rounds, clock) for axis, points in axes.items()}
        for work, axes in SWEEPS.items()
    }
    return {"works": swept}


def markdown(found: Mapping[str, Any]) -> str:
    """Returns the exponents with their intervals as Markdown, and draws the plot."""
    PLOT.parent.mkdir(exist_ok=True)
    draw(found["works"]).savefig(PLOT, metadata={"Date": None})
    lines = [
        *taken_on(found, found["rounds"]),
        "",
        "![Seconds against batch, length and size, on log axes](../docs/growth.svg)",
        "",
        "| work | against | from, to | seconds | exponent (95%) | of the larger half (95%) |",
        "|---|---|---|---|---|---|",
    ]
    for work, axes in found["works"].items():
        for axis, swept in axes.items():
            middles = [median(runs) for runs in swept["seconds"]]
            cells = [
                work, axis, f"{_short(swept['sizes'][0])}, {_short(swept['sizes'][-1])}",
                f"{middles[0]:.3g} to {middles[-1]:.3g}", _exponent(swept), _exponent(swept["upper_half"]),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _exponent(fitted: Mapping[str, float]) -> str:
    return f"{fitted['exponent']:.2f} ({fitted['lower']:.2f} to {fitted['upper']:.2f})"


def _short(number: float) -> str:
    return f"{number / 1e6:,.1f}M" if number >= 1e6 else f"{number:,.0f}"


def draw(works: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draws one panel per sweep with every run and the fitted line."""
    columns = max(map(len, works.values()))
    figure = Figure(figsize=(3.2 * columns, 2.6 * len(works)), layout="constrained")
    panels = figure.subplots(len(works), columns, squeeze=False)
    for row, (work, axes) in zip(panels, works.items(), strict=True):
        for panel, (axis, swept) in zip(row, axes.items(), strict=False):
            sizes = np.array(swept["sizes"], dtype=float)
            for size, runs in zip(sizes, swept["seconds"], strict=True):
                panel.plot([size] * len(runs), runs, ".", color="#2f6db3", markersize=5)
            panel.plot(sizes, swept["scale"] * sizes ** swept["exponent"], color="#999999", linewidth=1)
            panel.set(xscale="log", yscale="log", xlabel=axis, title=f"{work}: exponent {swept['exponent']:.2f}")
            panel.title.set_fontsize(9)
            panel.tick_params(labelsize=7)
            panel.set_xticks(sizes, map(_short, sizes))
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            for each in (panel.xaxis, panel.yaxis):
                each.set_minor_locator(NullLocator())
        row[0].set_ylabel("seconds")
    return figure


if __name__ == "__main__":
    print("\n" + json.dumps(measure(sys.argv[1], int(sys.argv[2]))), flush=True)
