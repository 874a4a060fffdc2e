"""Imports of Heed's packages, of a user's Python code, and of large libraries in less time.

Heed's packages have common words as names, so other modules may hide them. Standard library only.
"""

import gc
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from files.fields import no_such_file

ROOT = Path(__file__).parents[1]
SHOWN_FRAMES = 4  # of a traceback through a user's code

# The project's packages, from the top layer down. `benchmarks` is left out: no run needs it.
PACKAGES = (
    "heed", "evaluation", "classify", "sft", "dpo", "ppo", "reward", "pretrain", "stages", "cluster", "training", "lm",
    "preferences", "files", "configs",
)  # fmt: skip

# What the extra `labels` of pyproject.toml installs, by import name.
LABELS_EXTRA = (
    "fastapi", "starlette", "uvicorn", "python_multipart", "argon2", "authlib", "itsdangerous", "limits",
    "markdown_it", "mdit_py_plugins", "latex2mathml", "pygments", "nh3", "psycopg",
)  # fmt: skip

_INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
_user_folders: list[str] = []


def source_tree() -> str:
    """Returns the folder of this code if it is a checkout; "" if it is installed as a package or shipped with a job."""
    return str(ROOT) if (ROOT / "pyproject.toml").is_file() else ""


def missing_extra(error: ModuleNotFoundError) -> str:
    """Returns what to install if a module of the extra `labels` is missing; "" if it is another module."""
    module = (error.name or "").partition(".")[0]
    if module not in LABELS_EXTRA:
        return ""
    return (
        f"{module} is not installed; label pages, the arena, `heed watch` and stores in PostgreSQL need"
        " pip install 'heed-rlhf[labels]' (in a clone: pip install -e '.[labels]' -c constraints.txt)"
    )


def hiding_file(package: str) -> str:
    """Returns the file or folder that Python finds in place of one of Heed's packages; "" if it finds Heed's."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return ""
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    return "" if origin == str(ROOT / package / "__init__.py") else origin


def refuse_hidden() -> None:
    """Raise ImportError naming the file that hides one of Heed's packages, and what to do about it."""
    for package in PACKAGES:
        hiding = hiding_file(package)
        if hiding:
            folder = Path(hiding).parents[1 if hiding.endswith("__init__.py") else 0]
            where = "PYTHONPATH" if str(folder) in sys.path else "Python's search path"
            raise ImportError(f"{hiding} hides Heed's package {package!r}: rename it, or remove {folder} from {where}")


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Returns the function `MODULE:NAME` or `FILE.py:NAME`; modules in the current folder are found too.

    `what` names the kind of function in error messages. Raises: ValueError if there is no such function, or if the
    module's own code fails; the message then has the lines that led there.
    """
    place, _, attribute = name.partition(":")
    value = getattr(load_module(place, what), attribute, None)
    if not callable(value):
        raise ValueError(f"{what} {name!r}: {place} has no function {attribute!r}{_file_meant(place, attribute)}")
    function: Callable[..., Any] = value
    return function


def function_named(name: str, what: str) -> str:
    """Returns FILE.py:NAME for FILE.py if the file has one public function; any other name as it is.

    Raises: ValueError that lists the functions of a file with several, and as `load_function`.
    """
    if ":" in name or not name.endswith(".py"):
        return name
    module = load_module(name, what)
    functions = [
        f"{name}:{key}"
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    if len(functions) == 1:
        return functions[0]
    expected = f"one of {', '.join(functions)}" if functions else f"{name}:NAME, of a function in the file,"
    raise ValueError(f"{what} {name!r} names no function; {expected} was expected")


def _file_meant(module: str, attribute: str) -> str:
    """Returns a hint if the name is both a package of Heed and a file in the current folder."""
    if module not in PACKAGES or not Path(f"{module}.py").is_file():
        return ""
    return f"; {module} is a package of Heed: '{module}.py:{attribute}' names the file in this folder"


def file_of(function: Callable[..., Any]) -> Path:
    """Returns the source file of a function's module."""
    return Path(str(sys.modules[function.__module__].__file__))


def load_module(place: str, what: str) -> ModuleType:
    """Returns the module of this name, or in this file. Raises: ValueError as `load_function`.

    A file is loaded by its path, so it may have the same name as another module. It can import modules next to it
    whose names are not taken by Heed or an installed package.
    """
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(f"{what}: {place}: {no_such_file(place)}")
        return _module_of_file(Path(place).resolve(), what)
    import_from(str(Path.cwd()))  # `heed` is a script, for which Python does not look in the current folder
    try:
        return importlib.import_module(place)
    except Exception as error:  # a user's code
        if isinstance(error, ModuleNotFoundError) and error.name == place:
            raise ValueError(f"{what} {place!r}: {error}") from None
        raise ValueError(f"{what} {place!r}: importing it raised {explain(error)}") from None


def import_from(folder: str) -> None:
    """Let Python find a user's modules in this folder, after all others, so that none of them hides another module."""
    if folder not in _user_folders:
        _user_folders.append(folder)
    if folder not in sys.path:
        sys.path.append(folder)


def user_folders() -> list[str]:
    """Returns the folders in which this process looks for a user's modules."""
    return [*_user_folders]


def _module_of_file(path: Path, what: str) -> ModuleType:
    name = f"heed_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    import_from(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} is no Python file"
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's code
        del sys.modules[name]  # the next import would find a half-loaded module
        raise ValueError(f"{what}: importing {path} raised {explain(error)}") from None
    return module


def explain(error: Exception, caller: str = "") -> str:
    """Returns what a user's code raised, followed by the lines of that code that led there, innermost last.

    Lines of `caller`, the file that called it, are left out.
    """
    frames_of_error = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames_of_error if _is_users(frame.filename) and frame.filename != caller]
    lines = "".join(traceback.format_list(frames[-SHOWN_FRAMES:])).rstrip()
    return f"{type(error).__name__}: {error}" + (f"\n{lines}" if lines else "")


def _is_users(file: str) -> bool:
    """Whether a file is neither this one nor part of Python or an installed library."""
    return file != __file__ and not file.startswith(("<", *_INSTALLED))


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Keep the garbage collector off imported objects, now and later. For imports at a process's start.

    Garbage collection takes a quarter of the time to import PyTorch and a job's other libraries.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
