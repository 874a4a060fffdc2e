"""Opens the world that a name or a job file stands for."""

from pathlib import Path

from heed.jobs.job_file import load_job
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld
from stages.world import World

PLAYGROUND = "playground"


def open_world(place: str) -> World:
    """Open the world of a job file, or the playground by its name.

    Raises: ValueError if `place` is neither, or the job has no world.
    """
    if place == PLAYGROUND:
        return PlaygroundWorld(PlaygroundConfig())
    path = Path(place)
    if not place or not path.is_file():
        raise ValueError(f"gold:{place}: gold:{PLAYGROUND}, or gold:JOB.toml of a job with a world")
    world = load_job(path, []).open_world()
    if world is None:
        raise ValueError(f"{path} has no [world], so nothing scores its responses")
    return world
