"""What can be known to be wrong before any training starts is found here: rows that do not parse, prompts too long."""

from pathlib import Path

from files.importing import load_function
from files.rows import LOADERS
from heed.jobs.job import JobConfig
from heed.jobs.run import Run
from heed.jobs.submission import named_paths


def refuse_missing(job: JobConfig) -> None:
    """Raise ValueError, naming the job's field, where a data file that it names is missing."""
    for field, name in named_paths(job):
        is_file = field.endswith(".source") and Path(name.removesuffix(".gz")).suffix in LOADERS
        if is_file and not Path(name).exists():
            raise ValueError(f"{field}: {name}: no such file")


def check_data(run: Run) -> None:
    """Read every row that a later stage will read, with the tokenizer it will use; what training reads is tokenized for
    good, while no rank has a place yet.

    Raises: ValueError naming file, line and field.
    """
    job = run.job
    for stage in job.stages:  # these take no time
        for field in stage.function_fields:
            name = getattr(job.section_of(stage), field)
            if name:
                load_function(name, field.replace("_", " "))
    # The first stages have the most data: a mistake in that of later ones shows before hours of tokenizing.
    for stage in reversed(job.stages):
        stage_run = run.of(stage.name)
        stage.preflight(stage_run, stage_run.resolve(job.section_of(stage)))
