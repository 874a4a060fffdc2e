"""Writes the results as Markdown tables, one per kind of GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.rows import Row

NOT_MEASURED = "not yet measured"
HEAD = ("| work | measured | of the ceiling | aim | peak memory |", "|---|---|---|---|---|")
GIB = 2**30


def markdown(found: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """`found` maps device names to their `machine`, their `rates`, and their `rows` by name.

    Rows without results say so, and failed ones say why.
    """
    if not found:
        return "\n".join(["No GPU has been measured with these rows.", "", *_table({"rates": {}, "rows": {}}, rows)])
    return "\n\n".join("\n".join([*_about(device, rows), "", *_table(device, rows)]) for device in found.values())


def _about(device: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    machine, rates = device["machine"], device["rates"]
    software = ", ".join(f"{name} {machine[name]}" for name in ("driver", "cuda", "torch", "python") if name in machine)
    products = [f"{rates[row.name] / 1e12:.3g} ({row.name})" for row in rows if row.name in rates]
    return [
        f"**{machine['device']}**: {software}. A copy moves {rates['bytes'] / 1e12:.3g} TB/s, read and written;",
        f"TFLOP/s of bf16 matrix products at the models' own shapes: {', '.join(products)}.",
    ]


def _table(device: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    return [*HEAD, *(_line(row, device["rows"].get(row.name), device["rates"]) for row in rows)]


def _line(row: Row, figures: Mapping[str, Any] | None, rates: Mapping[str, float]) -> str:
    aim = f"{row.aim:.0%}" if row.aim else ""
    if figures is None:
        return _cells(row.name, NOT_MEASURED, "", aim, "")
    if "failed" in figures:
        return _cells(row.name, f"failed: {figures['failed'].replace('|', '/')}", "", aim, "")
    measured, share = DESCRIBED[row.kind](row, figures, rates)
    return _cells(row.name, measured, share, aim, _memory(figures))


def _cells(*cells: str) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


def _pretraining(row: Row, figures: Mapping[str, float], rates: Mapping[str, float]) -> tuple[str, str]:
    flops = figures["flops_per_second"]
    measured = f"{figures['tokens_per_second']:,.0f} tokens per second, {flops / 1e12:.3g} TFLOP/s"
    return measured, f"{flops / rates[row.name]:.0%} of the matrix rate"


def _generation(_row: Row, figures: Mapping[str, float], rates: Mapping[str, float]) -> tuple[str, str]:
    shortest = figures["decoded_bytes"] / rates["bytes"]
    fixed, eager = (shortest / figures[f"{kind}decoding_seconds"] for kind in ("", "eager_"))
    measured = f"{figures['tokens_per_second']:,.0f} tokens per second; eager {figures['eager_tokens_per_second']:,.0f}"
    return measured, f"{fixed:.0%} of the memory bandwidth; eager {eager:.0%}"


def _iteration(_row: Row, figures: Mapping[str, float], _rates: Mapping[str, float]) -> tuple[str, str]:
    phases = ("sampling", "scoring", "learning", "weights", "rest")
    parts = ", ".join(f"{name} {figures[f'{name}_seconds']:.2f}" for name in phases)
    rate = figures["response_tokens_per_second"]
    return f"{figures['seconds']:.2f} s: {parts}; {rate:,.0f} response tokens per second", ""


DESCRIBED = {"pretrain": _pretraining, "generate": _generation, "ppo": _iteration}


def _memory(figures: Mapping[str, float]) -> str:
    peak, planned = figures["peak_bytes"] / GIB, figures["planned_bytes"] / GIB
    return f"{peak:.1f} GiB, planned {planned:.1f}" if peak else f"planned {planned:.1f} GiB"
