"""One run of a job: its folder, and the workers that work for it."""

from dataclasses import dataclass
from pathlib import Path

from heed.jobs.job import JobConfig
from stages.progress import StageProgress
from stages.run import StageRun, StageWorkers
from stages.world import World


@dataclass(frozen=True)
class Run:
    """One run of a job."""

    job: JobConfig
    folder: Path
    opened_world: World | None
    workers: StageWorkers

    def of(self, stage: str, progress: StageProgress | None = None) -> StageRun:
        """What a stage of this run is given."""
        return StageRun(stage, self.job, self.folder, self.workers, self.opened_world, progress)

    def stage_folder(self, name: str) -> Path:
        """The folder of a stage or a preparation."""
        return self.folder / name

    def output(self, name: str) -> Path:
        """What later stages read of a stage or a preparation."""
        return self.folder / name / self.job.registry.output(name)
