"""`heed arena`: people talk to two policies side by side, without knowing which is which (docs/arena.md)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heed.commands.label import LabelToml, PublicUrl, Store, labeling_config
from heed.commands.options import Host, Port, Temperature, refuse_run_folder
from stages.progress import console

if TYPE_CHECKING:
    from heed.arena import ArenaPolicy
    from preferences.page.arena import ArenaPrompt
    from preferences.page.config import LabelingConfig

INSTRUCTIONS = """\
You talk to two models at once. Both answer side by side, in random order, without their names.

1. **Ask** whatever you would ask an assistant, or take a prompt from the list.
2. **Read** both answers to the end.
3. **Say** which answer is better, and why. You can change a verdict later.

Then continue the conversation if you like: after the answer that you choose, or each model after its own. Every turn
can get a verdict.
"""


def arena(
    policies: Annotated[
        list[str],
        typer.Argument(
            help="Two model directories, run folders, .gguf files, hub ids or endpoints URL#MODEL; prefix with NAME= to"
            " name one."
        ),
    ],
    store: Store,
    batch: Annotated[str, typer.Option(help="The batch that verdicts go to.")] = "arena",
    prompts: Annotated[
        str, typer.Option(help="Prompts that people can take: JSONL, CSV, Parquet or a hub id (docs/data.md).")
    ] = "",
    config: LabelToml = None,
    temperature: Temperature = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")] = 512,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    public_url: PublicUrl = "",
) -> None:
    """Let people talk to two policies side by side, blinded, and say which answers better. Verdicts are labels.

    The server has the labeling pages too. If the store has no lead yet, it prints a one-time link for one.
    """
    from heed.arena import ArenaSampling, PolicyProcesses
    from preferences.database import require_store, store_file
    from preferences.page.app import serve
    from preferences.page.arena import ArenaSetup

    path = store_file(store)
    if path is None or path.exists():
        require_store(store)
    merged = arena_config(labeling_config(config, public_url))
    found, listed = two_policies(policies), read_prompts(prompts)
    sampling = ArenaSampling(temperature, max_new_tokens)
    with console.status(f"loading {found[0].name} and {found[1].name}"):
        writers = PolicyProcesses(found, sampling)
    try:
        setup = ArenaSetup(writers, batch, listed)
        serve(store, merged, host=host, port=port, announce=typer.echo, arena=setup)
    finally:
        writers.close()


def arena_config(config: "LabelingConfig") -> "LabelingConfig":
    """Returns the configuration with the arena's title and instructions, unless the file has its own."""
    own = {"title": "Arena", "instructions": INSTRUCTIONS}
    return config.model_copy(update={name: text for name, text in own.items() if name not in config.model_fields_set})


def two_policies(specs: Sequence[str]) -> "tuple[ArenaPolicy, ArenaPolicy]":
    """Returns two policies, given as SPEC or NAME=SPEC. A run's folder stands for the model of its PPO stage, and the
    folder of a stage for its model.

    Raises: ValueError unless they are two different models or endpoints that write text.
    """
    from evaluation.inputs import named_specs
    from heed.arena import arena_policy

    if len(specs) != 2:
        raise ValueError(f"{len(specs)} policies were given; two were expected")
    first, second = (arena_policy(name, _model_of(spec)) for name, spec in named_specs(specs, "policy"))
    if first.sha256 and first.sha256 == second.sha256:
        raise ValueError(f"{first.spec} and {second.spec} are the same model; two different ones were expected")
    return first, second


def _model_of(spec: str) -> str:
    """Returns the model in a stage's or a run's folder; any other spec as it is."""
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        return spec
    for model in (folder, folder / "model", folder / "ppo" / "model"):
        if (model / "config.json").is_file():
            return str(model)
    refuse_run_folder(folder)
    return spec


def read_prompts(source: str) -> "list[ArenaPrompt]":
    """Reads the prompts that people can take; none if `source` is "".

    Raises: ValueError naming file, line and field.
    """
    from evaluation.inputs import read_compared_prompts
    from preferences.page.arena import ArenaPrompt
    from preferences.records import Message
    from training.data import DataConfig

    if not source:
        return []
    return [
        ArenaPrompt(prompt.prompt_id, tuple(Message.of(turn) for turn in prompt.messages))
        for prompt in read_compared_prompts(DataConfig(source=source))
    ]
