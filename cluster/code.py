"""A user's code on the ranks, which may be unable to import it: the file lies on the driver's machine alone."""

from types import ModuleType

from ray import cloudpickle


def send_by_value(module: ModuleType) -> None:
    """From now on send the module's functions and classes to ranks as code, not as names to import."""
    cloudpickle.register_pickle_by_value(module)
