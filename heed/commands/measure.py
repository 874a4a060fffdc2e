"""`heed measure`: measures of policies and reward models (docs/measures.md)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heed.commands.options import Weights, length_that_fits, model_folder, read_weights
from stages.progress import console, results_console

if TYPE_CHECKING:
    from collections.abc import Sequence

measure_app = typer.Typer(no_args_is_help=True, help="Measure policies and reward models.")


Seed = Annotated[int, typer.Option(min=0, help="Seed for sampling and resampling.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write all numbers to this file, as JSON.", show_default=False)
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; above 0.")]
MaxNewTokens = Annotated[
    int, typer.Option(min=1, help="Maximum length of a response, in tokens; less if the longest prompt leaves less.")
]


@measure_app.command("reward")
def measure_reward(
    model: Annotated[Path, typer.Argument(help="A reward model's directory, such as runs/demo/reward/model.")],
    file: Annotated[str, typer.Argument(help="Rankings or pairs in any format of docs/labels.md.")],
    form: Annotated[str, typer.Option("--format", help="Format of the rows; docs/labels.md lists them.")] = "auto",
    heldout_share: Annotated[
        float, typer.Option(min=0, max=1, help="Use only prompts that a run with this reward.heldout_share held out.")
    ] = 1.0,
    weight: Weights = None,
    seed: Annotated[
        int, typer.Option(min=0, help="With --heldout-share, the run's seed; otherwise only for resampling.")
    ] = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure a reward model: accuracy, calibration, accuracy by margin and category, and the labelers' ceiling."""
    from evaluation.measures.reward_model import heldout_only, measure_reward_model, read_judged
    from heed.commands.measure_tables import reward_tables

    judged = read_judged(file, form)
    if heldout_share < 1:
        judged = heldout_only(judged, heldout_share, seed)
    with console.status(f"scoring {len(judged.rankings):,} rankings"):
        found = measure_reward_model(model_folder(model), judged, seed=seed, weights=read_weights(weight))
    _print(reward_tables(found), found, json_file)


@measure_app.command("kl")
def measure_kl(
    policy: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/ppo/model.")],
    reference: Annotated[Path, typer.Argument(help="The model it started from, such as runs/demo/sft/model.")],
    prompts: Annotated[str, typer.Option(help="Prompts: JSONL, CSV, Parquet or a hub id.")],
    samples: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    max_prompts: Annotated[
        int, typer.Option(min=0, help="Number of prompts to read (default: all).", show_default=False)
    ] = 0,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure the KL of a policy to its reference, unclamped, by three estimators."""
    from evaluation.measures.kl import Policy, draw
    from evaluation.measures.kl import measure_kl as measured
    from heed.commands.measure_tables import kl_table
    from training.data import DataConfig, read_prompts

    asked = read_prompts(DataConfig(source=prompts, max_rows=max_prompts))
    policy, reference = model_folder(policy), model_folder(reference)
    length = length_that_fits([policy, reference], asked, max_new_tokens)
    ours, theirs = Policy.load(policy), Policy.load(reference)
    with console.status(f"sampling {samples} responses to {len(asked):,} prompts"):
        drawn = draw(ours, asked, num_samples=samples, max_new_tokens=length, temperature=temperature, seed=seed)
        found = measured(ours, theirs, drawn)
    _print([kl_table(found)], found, json_file)


@measure_app.command("over-optimisation")
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
    from heed.commands.measure_tables import over_optimisation_tables
    from heed.studies.over_optimisation import measure_run

    with console.status("sampling") as status:
        found = measure_run(
            run,
            prompts=prompts,
            gold=gold,
            num_samples=samples,
            pool_samples=pool,
            seed=seed,
            progress=lambda what: status.update(f"measuring {what}"),
        )
    _print(over_optimisation_tables(found), found, json_file)


@measure_app.command("tax")
def measure_tax(
    before: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/pretrain/model.")],
    after: Annotated[list[Path], typer.Argument(help="Models trained from it; each is compared with the first.")],
    text: Annotated[
        list[str] | None, typer.Option(help="Held-out texts: text files, JSONL, CSV or Parquet; may repeat.")
    ] = None,
    field: Annotated[str, typer.Option(help="Field of a row that holds the text.")] = "text",
    few_shot: Annotated[
        list[str] | None, typer.Option(help='Few-shot examples: rows of {"prompt", "completion"}; may repeat.')
    ] = None,
    shots: Annotated[int, typer.Option(min=0, help="Solved examples shown before each.")] = 4,
    max_rows: Annotated[
        int, typer.Option(min=0, help="Number of rows to read per file (default: all).", show_default=False)
    ] = 0,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure the alignment tax: what policies lost in bits per byte and on few-shot tasks, in paired comparisons."""
    from evaluation.measures.language_modelling import Task, read_examples
    from evaluation.measures.language_modelling import measure_tax as measured
    from heed.commands.measure_tables import tax_tables
    from training.data import DataConfig, TextConfig, read_texts

    policies = {str(model): model_folder(model) for model in (before, *after)}
    if len(policies) < 1 + len(after):
        raise ValueError(f"{before} {' '.join(map(str, after))}: each model directory may be named only once")
    texts = list(read_texts([TextConfig(source=source, field=field, max_rows=max_rows) for source in text or []]))
    tasks = [
        Task(source, read_examples(DataConfig(source=source, max_rows=max_rows)), shots) for source in few_shot or []
    ]
    with console.status(f"{len(policies)} policies, {len(texts):,} texts, {len(tasks)} tasks"):
        found = measured(policies, texts, tasks, seed=seed)
    _print(tax_tables(found), found, json_file)


@measure_app.command("harness")
def measure_harness(
    model: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/ppo/model.")],
    task: Annotated[list[str], typer.Option(help="A task of lm-evaluation-harness, or of --include; may repeat.")],
    include: Annotated[Path | None, typer.Option(help="Folder with your own tasks (YAML).")] = None,
    shots: Annotated[
        int, typer.Option(min=-1, help="Solved examples shown (default: the task's number).", show_default=False)
    ] = -1,
    limit: Annotated[int, typer.Option(min=0, help="Documents per task (default: all).", show_default=False)] = 0,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = False,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Run tasks of EleutherAI's lm-evaluation-harness; needs Heed's `harness` extra."""
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise ValueError("lm_eval is not installed; run pip install '.[harness]'")
    from evaluation.harness import run_tasks
    from heed.commands.measure_tables import harness_table

    found = run_tasks(
        model_folder(model),
        task,
        include=include,
        num_shots=None if shots < 0 else shots,
        limit=limit or None,
        chat=chat,
        seed=seed,
    )
    _print([harness_table(found)], found, json_file)


def _print(shown: "Sequence[Any]", found: Any, json_file: Path | None) -> None:
    """Prints tables and notes to the terminal, and writes all numbers to the file."""
    from files.records import as_json

    for part in shown:
        results_console().print(part)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(found), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        console.print(str(json_file))
