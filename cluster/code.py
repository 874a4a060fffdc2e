"""Which code the ranks import: the driver's copy of Heed, and user code that may exist only on the driver's machine."""

from types import ModuleType

from ray import cloudpickle
from ray.job_config import JobConfig

from files.importing import source_tree


class HeedFirst(JobConfig):
    """Where workers look for modules: in the driver's tree of Heed first, if that is a checkout.

    Ray would put the driver's script folder and current folder before everything else, so a user's `reward.py` or
    `datasets.py` would replace the package of that name. A rank adds the current folder after all others.
    """

    def __init__(self) -> None:
        super().__init__(_py_driver_sys_path=[source_tree()] if source_tree() else [])

    def _runtime_env_has_working_dir(self) -> bool:
        """Claims to have one: Ray asks only to decide whether to add its folders (`ray._private.worker.connect`)."""
        return True


def send_by_value(module: ModuleType) -> None:
    """From now on, send the module's functions and classes to ranks as code rather than as names to import."""
    cloudpickle.register_pickle_by_value(module)
