"""The folder of a run, as for the other measures."""

from tests.heed.test_measure import prompts, run_folder

__all__ = ["prompts", "run_folder"]
