"""Which code the ranks import: Heed's as the driver's, and a user's, which may lie on the driver's machine alone."""

from types import ModuleType

from ray import cloudpickle
from ray.job_config import JobConfig

from files.packages import source_tree


class HeedFirst(JobConfig):
    """Where workers look for modules: in the driver's tree of Heed first, if that is a checkout.

    Ray would put the driver's script folder and current folder before everything else, and a user's `reward.py` or
    `datasets.py` in place of the package of that name. A rank adds the current folder after all others.
    """

    def __init__(self) -> None:
        super().__init__(_py_driver_sys_path=[source_tree()] if source_tree() else [])

    def _runtime_env_has_working_dir(self) -> bool:
        """Says that it has one: Ray asks only to learn whether to add its folders (`ray._private.worker.connect`)."""
        return True


def send_by_value(module: ModuleType) -> None:
    """From now on send the module's functions and classes to ranks as code, not as names to import."""
    cloudpickle.register_pickle_by_value(module)
