"""`python -m research.over_optimisation RUN`: gold score of a run's policies against their distance from the first."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from heed.cli import run_app
from heed.commands.measure import JsonFile, Seed, number, print_measures, spread, table
from research.over_optimisation.curves import Point
from research.over_optimisation.fits import Overoptimised
from research.over_optimisation.policies import OverOptimisation
from research.over_optimisation.run import measure_run
from stages.progress import console

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def measure_over_optimisation(
    run: Annotated[Path, typer.Argument(help="A run folder whose job set ppo.keep_policies_every.")],
    prompts: Annotated[
        str, typer.Option(help="Prompts: JSONL, CSV, Parquet or a hub id (default: those of the compare stage).")
    ] = "",
    gold: Annotated[
        str, typer.Option(help="Scoring function, FILE.py:FUNCTION (default: the gold scorer of the job's world).")
    ] = "",
    samples: Annotated[int, typer.Option(min=1, help="Responses per policy and prompt.")] = 4,
    pool: Annotated[
        int, typer.Option(min=2, help="Responses of the reference per prompt, for best-of-n up to this n.")
    ] = 64,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure over-optimisation: proxy and gold score against √KL, for PPO and best-of-n, and where to stop."""
    with console.status("sampling") as status:
        curves = measure_run(
            run,
            prompts=prompts,
            gold=gold,
            num_samples=samples,
            pool_samples=pool,
            seed=seed,
            progress=lambda what: status.update(f"measuring {what}"),
        )
    print_measures(over_optimisation_tables(curves), curves, json_file)


def over_optimisation_tables(curves: OverOptimisation) -> list[RenderableType]:
    tables: list[RenderableType] = [
        table(
            "policy", "√KL", "KL, nats (95%)", "gold gain (95%)", "proxy gain (95%)",
            rows=[_point(point) for point in (*curves.rl_points, *curves.best_of_n_points)],
            title=f"{curves.num_prompts:,} prompts; the KL of best-of-n is an upper bound",
        )
    ]  # fmt: skip
    for name, fit in (("PPO", curves.rl), ("best-of-n", curves.best_of_n)):
        if fit is None:
            tables.append(f"{name}: fewer than three policies at distinct distances, so nothing is fitted")
        else:
            tables += [_fit_table(name, fit), fit.advice]
    if curves.num_dropped:
        tables.append(f"{curves.num_dropped:,} prompts left out because scores failed: {curves.first_failure}")
    return tables


def _point(point: Point) -> list[str]:
    return [point.name, number(point.d, 2), spread(point.kl_nats), spread(point.gold), spread(point.proxy)]


def _fit_table(name: str, fit: Overoptimised) -> Table:
    rows = [
        ["gold α", spread(fit.gold.alpha)],
        ["gold β", spread(fit.gold.beta)],
        ["proxy α", spread(fit.proxy.alpha)],
        ["proxy β", spread(fit.proxy.beta)],
        ["optimum, √KL", spread(fit.optimum.d)],
        ["optimum, KL in nats", spread(fit.optimum.kl_nats)],
        ["gold gain there", spread(fit.optimum.gain)],
        ["largest misfit, standard errors", number(fit.gold.misfit, 1)],
    ]
    return table(name, "95%", rows=rows)


if __name__ == "__main__":
    run_app(app)
