"""The processes in which a response's code is tested; `reward.verifiers.sandbox` starts the first.

Standard library only, since it starts without installed packages. It imports the modules that code may use. For each
response it forks twice and waits; it reads nothing itself. The *answerer* will hold the response's code and nothing
else. The *examiner* reads the request and runs the tests. Both limit themselves: from then on the kernel refuses every
system call but those of ALLOWED, which compute, allocate memory, tell the time, and use files that are open: no file
can be opened, no process or thread started, no socket made, no other process be signalled.

What a test calls or reads of the code's is a message to the answerer, which carries the arguments and nothing else of
the test. Values of the types in DATA travel as data; any other object stays where it is, and the other side holds a
`Remote` for it. So tests compare values that the examiner built itself.
"""

import builtins
import ctypes
import errno
import importlib
import json
import operator
import os
import platform
import resource
import secrets
import signal
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any, NoReturn

PASSED, WRONG, REFUSED, FORGED, KILLED, ENDED, GAVE_UP = range(10, 17)  # exit statuses of the two processes
# ENDED = of an examiner whose answerer has ended or closed the channel; GAVE_UP = of an answerer that cannot reply
WORDS = {PASSED: b"passed\n", WRONG: b"wrong\n", REFUSED: b"refused\n", FORGED: b"forged\n", KILLED: b"killed\n"}
MODULES = (
    "__future__", "abc", "array", "base64", "bisect", "calendar", "cmath", "collections", "collections.abc",
    "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq",
    "inspect", "io", "itertools", "json", "math", "numbers", "operator", "os", "pprint", "queue", "random", "re",
    "statistics", "string", "struct", "sys", "textwrap", "time", "traceback", "types", "typing", "unicodedata",
    "csv", "graphlib", "html", "logging", "pickle", "secrets", "unittest", "uuid", "warnings", "zlib", "_strptime",
    "encodings.idna", "encodings.latin_1", "encodings.ascii",
)  # fmt: skip

# Numbers of system calls on (x86_64, aarch64); -1 = it does not exist there.
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "rt_sigreturn": (15, 139), "restart_syscall": (219, 128),
    "getpid": (39, 172), "gettid": (186, 178), "exit": (60, 93), "exit_group": (231, 94), "futex": (202, 98),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, -1),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "getrandom": (318, 278), "getrusage": (98, 165), "times": (100, 153),
}  # fmt: skip
# Column of ALLOWED; AUDIT_ARCH of linux/audit.h.
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# linux/prctl.h, linux/seccomp.h and linux/bpf_common.h
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2
RET_ALLOW, RET_EPERM, RET_KILL = 0x7FFF0000, 0x00050001, 0x80000000
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
AT_NUMBER, AT_ARCHITECTURE = 0, 4  # offsets in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


# --- values ----------------------------------------------------------------------------------------------------------

NATIVE = {type(None), bool, int, float, str}  # JSON has them, as it has lists
# What else travels as data, by its tag: the type, its parts, and what makes it of them.
DATA: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "tuple": (tuple, list, lambda *parts: parts),
    "set": (set, list, lambda *parts: set(parts)),
    "frozenset": (frozenset, list, lambda *parts: frozenset(parts)),
    "defaultdict": (defaultdict, lambda value: [*map(list, value.items())], lambda *pairs: dict(pairs)),
    "OrderedDict": (OrderedDict, lambda value: [*map(list, value.items())], lambda *pairs: OrderedDict(pairs)),
    "Counter": (Counter, lambda value: [*map(list, value.items())], lambda *pairs: Counter(dict(pairs))),
    "dict": (dict, lambda value: [*map(list, dict.items(value))], lambda *pairs: dict(pairs)),
    "deque": (deque, lambda value: [value.maxlen, *value], lambda maxlen, *parts: deque(parts, maxlen)),
    "bytes": (bytes, lambda value: [value.hex()], bytes.fromhex),
    "bytearray": (bytearray, lambda value: [value.hex()], bytearray.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], complex),
    "range": (range, lambda value: [value.start, value.stop, value.step], range),
    "slice": (slice, lambda value: [value.start, value.stop, value.step], slice),
    "Decimal": (Decimal, lambda value: [str(value)], Decimal),
    "Fraction": (Fraction, lambda value: [value.numerator, value.denominator], Fraction),
    "datetime": (datetime, lambda value: [value.isoformat()], datetime.fromisoformat),
    "date": (date, lambda value: [value.isoformat()], date.fromisoformat),
    "time": (time, lambda value: [value.isoformat()], time.fromisoformat),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds], timedelta),
}
TAGS: dict[Any, str] = {of[0]: tag for tag, of in DATA.items()}
MUTABLE = (list, dict, OrderedDict, Counter, set, bytearray, deque)
EXACT: dict[Any, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__, list: list}
# Modules whose types and functions both sides have under one name. None of them runs text as code.
TRUSTED = (
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
    "json", "math", "random", "re", "statistics", "string",
)  # fmt: skip
SHARED: dict[str, Any] = {}


def share() -> None:
    """Fill SHARED, once all modules are imported."""
    found = [*NATIVE, *TAGS, list, type, object, FunctionType, GeneratorType]
    found += [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
    for module in TRUSTED:
        found += [value for name, value in vars(sys.modules[module]).items() if not name.startswith("_")]
    SHARED.update((full_name(value), value) for value in found if full_name(value))


def full_name(value: Any) -> str:
    has_name = isinstance(value, (type, FunctionType, BuiltinFunctionType))
    return f"{value.__module__}.{value.__qualname__}" if has_name else ""


def plain_base(kind: type) -> Any:
    """Returns the type of DATA, or list or a native one, that a type is or inherits from; None without any."""
    return next((base for base in kind.__mro__ if base in TAGS or base is list or base in NATIVE), None)


def plain(value: Any) -> Any:
    """Returns the value of an instance of a subclass as one of the plain type."""
    base = plain_base(type(value))
    return EXACT[base](value) if base in EXACT else DATA[TAGS[base]][2](*DATA[TAGS[base]][1](value))


def update(old: Any, new: Any) -> None:
    """Copy a call's changes into a mutable argument."""
    old.clear()
    old.extend(new) if isinstance(old, (list, deque, bytearray)) else old.update(new)


# --- objects ---------------------------------------------------------------------------------------------------------

UNARY: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (len, iter, next, hash, str, repr, bool, int, float, complex, abs, round)},
    **{name: getattr(operator, name) for name in ("index", "neg", "pos", "invert", "getitem", "setitem", "delitem")},
    "reversed": reversed, "format": format, "dir": dir, "enter": lambda value: type(value).__enter__(value),
    "instancecheck": lambda kind, value: isinstance(value, kind),
    "subclasscheck": lambda kind, other: issubclass(other, kind),
}  # fmt: skip
REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow", "and", "or", "xor", "lshift", "rshift")
BINARY = (*REFLECTED, "lt", "le", "gt", "ge", "contains")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **UNARY, **{name: getattr(operator, f"__{name}__") for name in BINARY}, "getattr": getattr, "setattr": setattr,
    "call": lambda function, /, *values, **named: function(*values, **named), "eq": operator.eq,
    "exit": lambda value, kind, values: type(value).__exit__(value, kind, kind and kind(*values), None),
    "plain": lambda value: [plain(value)] if plain_base(type(value)) else [],
}  # fmt: skip
# Methods of plain types to which a test passes what it expects, so that an object in their place could say yes.
COMPARING = {
    "count", "index", "find", "rfind", "startswith", "endswith", "issubset", "issuperset", "isdisjoint", "difference",
    "symmetric_difference", "intersection", "union",
}  # fmt: skip


class Remote:
    """An object of the other side, where all operations on it run, with the values that the test gives.

    It sees what a test compares it with only if the test made it, by calling a class with a capital letter. Otherwise a
    function could return an object in place of a plain value, which then says that it is right.
    """

    __slots__ = ("_at", "_is_made", "_name", "_peer")

    def __init__(self, peer: "Peer", at: int) -> None:
        for name, value in {"_peer": peer, "_at": at, "_is_made": False, "_name": ""}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        found = self._peer.ask("getattr", self, name)
        if type(found) is Remote:
            object.__setattr__(found, "_name", name if self._is_made or name not in COMPARING else f" {name}")
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __call__(self, /, *values: Any, **named: Any) -> Any:
        if self._name.startswith(" "):
            self._peer.refuse(f"{self._name} of an object")
        result = self._peer.ask("call", self, *values, **named)
        if type(result) is Remote:
            object.__setattr__(result, "_is_made", self._name.lstrip("_")[:1].isupper())
        return result

    def __eq__(self, other: object) -> bool:
        return self is other or self._peer.equal(self, other)

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> Any:
        return self._peer.ask("exit", self, kind, [*error.args] if error else [])

    def __reduce_ex__(self, _: object) -> Any:
        return self._peer.refuse("a copy of an object")

    def __mro_entries__(self, _: object) -> Any:
        return self._peer.refuse("a class that inherits from one of the code's")

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        kind = self._peer.ask("getattr", self, "__class__")
        return Remote if type(kind) is Remote else kind

    def _operate(self, name: str, left: Any, right: Any) -> Any:
        if not (self._is_made or type(left) is type(right)):
            self._peer.refuse(f"{name} of an object and a plain value")
        result = self._peer.ask(name, left, right)
        if type(result) is Remote:
            object.__setattr__(result, "_is_made", self._is_made)
        return result


for _name in UNARY:
    setattr(Remote, f"__{_name}__", lambda self, *values, name=_name: self._peer.ask(name, self, *values))
for _name in BINARY:
    setattr(Remote, f"__{_name}__", lambda self, other, name=_name: self._operate(name, self, other))
for _name in REFLECTED:
    setattr(Remote, f"__r{_name}__", lambda self, other, name=_name: self._operate(name, other, self))


class Peer:
    """One side: the objects that the other side may use, and those of the other side that this one holds."""

    when_closed = when_garbled = FORGED  # exit statuses

    def __init__(self, read_from: int, write_to: int) -> None:
        self.source, self.target = open(read_from, "rb"), write_to  # noqa: SIM115  # until the process ends
        self.objects: list[Any] = []
        self.places: dict[int, int] = {}  # id of an object -> its place in `objects`, which keeps it alive
        self.remotes: dict[int, Any] = {}
        self.number = 0
        self.decoders: dict[str, Callable[..., Any]] = {
            "yours": self.objects.__getitem__,
            "mine": self.remote,
            "shared": SHARED.__getitem__,
            "exception": self.exception,
            "named": lambda name, fields, *values: namedtuple(name, fields)(*map(self.decode, values)),
        }

    def encode(self, value: Any, is_made: bool = False) -> Any:
        """Returns a value as JSON can hold it. What a class has just made stays an object if it has methods of its own,
        such as those of a subclass of dict.
        """
        kind = type(value)
        if kind in NATIVE:
            return value
        if kind is list:
            return [*value] if {*map(type, value)} <= NATIVE else [*map(self.encode, value)]
        if kind is Remote:
            return {"yours": [value._at]}
        base = plain_base(kind)
        if base is tuple and hasattr(kind, "_fields"):
            return {"named": [kind.__name__, [*kind._fields], *map(self.encode, value)]}
        if kind is base:
            return {TAGS[base]: [*map(self.encode, DATA[TAGS[base]][1](value))]}
        if base and not (is_made or id(value) in self.places or hasattr(kind, "__members__")):  # an enum keeps its name
            return self.encode(plain(value))
        name = full_name(value)
        return {"shared": [name]} if SHARED.get(name) is value else self.encode_object(value)

    def encode_object(self, value: Any) -> Any:
        at = self.places.setdefault(id(value), len(self.objects))
        if at == len(self.objects):
            self.objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(base for base in value.__bases__ if issubclass(base, BaseException))
            return {"exception": [at, value.__name__, self.encode(base)]}
        return {"mine": [at]}

    def decode(self, value: Any) -> Any:
        """Returns the value that `encode` got. Raises: some exception if it is nothing that `encode` returns."""
        if type(value) is list:
            return [*value] if {*map(type, value)} <= NATIVE else [*map(self.decode, value)]
        if type(value) in NATIVE:
            return value
        [(tag, parts)] = value.items()
        return DATA[tag][2](*map(self.decode, parts)) if tag in DATA else self.decoders[tag](*parts)

    def remote(self, at: int) -> Remote:
        found: Remote = self.remotes.setdefault(at, Remote(self, at))
        object.__setattr__(found, "_is_made", False)  # even if the test made it: now a function has returned it
        return found

    def exception(self, at: int, name: str, base: Any) -> Any:
        kind = self.decode(base)
        assert issubclass(kind, BaseException), kind
        return self.remotes.setdefault(at, type(name, (kind,), {"__str__": lambda error: error.__dict__["said_there"]}))

    def send(self, *message: Any) -> None:
        text = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            while text:
                text = text[os.write(self.target, text) :]
        except OSError:
            os._exit(self.when_closed)

    def receive(self) -> Any:
        line = self.source.readline()
        return json.loads(line) if line.endswith(b"\n") else os._exit(self.when_closed)

    def ask(self, operation: str, /, *values: Any, **named: Any) -> Any:
        """Returns what an operation gives on the other side. Raises: what it raises there."""
        self.number += 1
        number = self.number
        self.send("ask", number, operation, self.encode(list(values)), {key: self.encode(named[key]) for key in named})
        try:
            while (message := self.receive())[0] == "ask":
                self.serve(*message[1:])
            what, to, first, second = message
            assert (what, to) in (("raise", number), ("reply", number)), message[:2]
            if what == "raise":
                kind, arguments, attributes = map(self.decode, first)
                error = self.error(operation, kind, arguments, {**attributes, "said_there": second})
            else:
                for key, new in second:
                    update(named[key] if type(key) is str else values[key], self.decode(new))
                result = self.decode(first)
        except (MemoryError, RecursionError):  # a value that is too large
            raise
        except Exception:
            os._exit(self.when_garbled)
        if what == "raise":
            raise error
        return result

    def error(self, operation: str, kind: Any, values: list[Any], attributes: dict[str, Any]) -> Any:
        if issubclass(kind, (StopIteration, StopAsyncIteration, GeneratorExit)) and operation != "next":
            kind = RuntimeError  # or `all(map(...))` of a test would end early
        error = kind(*values)
        assert isinstance(error, BaseException), error
        error.__dict__.update(attributes)
        return error

    def serve(self, number: int, operation: str, values: list[Any], named: dict[str, Any]) -> None:
        try:
            arguments, keywords = self.decode(values), {key: self.decode(named[key]) for key in named}
            result = self.do(operation, *arguments, **keywords)
            places: list[tuple[Any, Any, Any]] = [*zip(range(len(values)), arguments, values, strict=True)]
            places += zip(keywords, keywords.values(), named.values(), strict=True)
            mutable = [of for of in places if operation == "call" and type(of[1]) in MUTABLE]
            changed = [[key, new] for key, value, old in mutable if (new := self.encode(value)) != old]
            is_made = operation == "call" and isinstance(arguments[0], type)
            message = ["reply", number, self.encode(result, is_made), changed]
        except BaseException as error:  # is raised where it was asked
            attributes = {key: value for key, value in vars(error).items() if key != "said_there"}
            parts = [self.encode(part) for part in (type(error), [*error.args], attributes)]
            message = ["raise", number, parts, f"{error}"]
        self.send(*message)

    def do(self, operation: str, /, *values: Any, **named: Any) -> Any:
        return OPERATIONS[operation](*values, **named)

    def refuse(self, what: str) -> NoReturn:
        raise TypeError(f"{what}: not between the code and its tests")

    def equal(self, remote: Remote, other: object) -> bool:  # noqa: ARG002  # a function of the tests is only itself
        return False


# --- the two sides ---------------------------------------------------------------------------------------------------


class Answerer(Peer):
    """The side of the response's code. The first object that it shares is the code's module."""

    def __init__(self, read_from: int, write_to: int) -> None:
        super().__init__(read_from, write_to)
        self.module = sys.modules["response"] = ModuleType("response")
        self.encode_object(self.module)

    def do(self, operation: str, /, *values: Any, **named: Any) -> Any:
        return self.load(*values) if operation == "load" else super().do(operation, *values, **named)

    def load(self, code: str) -> dict[str, bool]:
        """Run the code. Returns its names, and which of them are modules."""
        names = self.module.__dict__
        with suppress(SystemExit):  # the usual end of a program
            exec(compile(code, "response", "exec"), names)
        found = {name: isinstance(value, ModuleType) for name, value in names.items() if not name.startswith("__")}
        names.setdefault("__all__", [name for name in found if not name.startswith("_")])
        return found


class Examiner(Peer):
    """The side of the tests. The code may call what a test passes to it, and nothing else."""

    when_closed = ENDED
    has_refused = False

    def encode_object(self, value: Any) -> Any:
        if not (callable(value) or hasattr(value, "__next__")):
            self.refuse(f"an object of type {type(value).__name__}")
        return super().encode_object(value)

    def serve(self, number: int, operation: str, values: list[Any], named: dict[str, Any]) -> None:
        assert [*values[0]] == ["yours"], values[0]
        super().serve(number, operation, values, named)

    def do(self, operation: str, /, *values: Any, **named: Any) -> Any:
        is_name = operation == "getattr" and values[1] in ("__name__", "__qualname__", "__doc__")
        if not is_name and operation not in ("call", "next", "iter", "hash", "bool"):
            raise AttributeError(operation)
        return super().do(operation, *values, **named)

    def refuse(self, what: str) -> NoReturn:
        self.has_refused = True
        super().refuse(what)

    def equal(self, remote: Remote, other: object) -> bool:
        """Returns whether objects are equal by their class, or an object's plain value is the other one."""
        if type(other) is not Remote and (found := self.ask("plain", remote)):
            return bool(found == [other])
        if type(other) is Remote and not self.ask("eq", remote, other):
            return False
        try:
            equals_everything = self.ask("eq", remote, secrets.token_hex()) is True
        except Exception:
            equals_everything = False
        if equals_everything:
            os._exit(FORGED)
        return type(other) is Remote


class Names(dict[str, Any]):
    """The names of the tests: their own, then those that the code defines, as they are when a test reads them.

    A name that Python or MODULES have is the code's only if the tests use no other name that it defines.
    """

    def __init__(self, response: Remote, is_module: dict[str, bool], programs: Sequence[CodeType]) -> None:
        super().__init__(__name__="tests")
        used = {*is_module}.intersection(*[set().union(*map(names_in, programs))])
        self.response, self.is_module = response, is_module
        self.shown = {name for name in used if is_module[name] or name not in {*dir(builtins), *MODULES}} or used

    def __missing__(self, name: str) -> Any:
        if name not in self.shown:
            raise KeyError(name)
        if self.is_module[name] and name in MODULES:
            return sys.modules[name]
        found = getattr(self.response, name)
        if type(found) is Remote:
            self[name] = found
        return found


def names_in(program: CodeType) -> set[str]:
    inner = [names_in(constant) for constant in program.co_consts if isinstance(constant, CodeType)]
    return {*program.co_names}.union(*inner)


def answer(read_from: int, write_to: int, limits: tuple[int, int]) -> NoReturn:
    """Do what the examiner asks, until it ends."""
    try:
        peer = Answerer(read_from, write_to)
        try:
            limit(*limits, read_from, write_to)
        except OSError as error:
            peer.send(f"{error}")
            os._exit(1)
        peer.send("ready")
        while True:
            peer.serve(*peer.receive()[1:])
    except OSError:  # the code closed the channel
        os._exit(FORGED)
    finally:  # nothing of the first process may run in this one
        os._exit(GAVE_UP)


def examine(read_from: int, write_to: int, limits: tuple[int, int]) -> NoReturn:
    """Read a request and run its tests. Ends this process with a verdict; with 1 if there is none to give."""
    peer = Examiner(read_from, write_to)
    try:
        request = json.loads(sys.stdin.readline())
        [said] = peer.receive()
        assert said == "ready", said
        limit(*limits, read_from, write_to)
    except BaseException as error:
        os.write(2, f"{error}".encode())
        os._exit(1)
    sys.modules["response"] = response = peer.remote(0)  # type: ignore[assignment]
    object.__setattr__(response, "_is_made", True)  # its functions may have the names in COMPARING
    try:
        is_module = peer.ask("load", request["code"])
        programs = [compile(test, f"test {number}", "exec") for number, test in enumerate(request["tests"])]
        names = Names(response, is_module, programs)
        for program in programs:
            exec(program, names)
        run_defined(names)
        peer.ask("bool", response)  # to see that nothing else is in the channel
    except BaseException as error:
        reaches = isinstance(error, OSError) and error.errno == errno.EBADF  # for a descriptor that it does not have
        os._exit(FORGED if reaches else REFUSED if peer.has_refused else WRONG)
    os._exit(PASSED)


def run_defined(names: Names) -> None:
    """Run the functions `test...()` and the classes of unittest that the tests define."""
    import unittest

    suite = unittest.TestSuite()
    for name, value in names.items():
        if type(value) is FunctionType and name.startswith("test") and not value.__code__.co_argcount:
            suite.addTest(unittest.FunctionTestCase(value))
        elif issubclass(type(value), type) and issubclass(value, unittest.TestCase):
            suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(value))
    result = unittest.TestResult()
    suite.run(result)
    assert result.wasSuccessful(), result


def limit(cpu_seconds: int, memory_bytes: int, read_from: int, write_to: int) -> None:
    """Limit this process for good, to the two descriptors. Raises: OSError if the system does not support a limit."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)  # what code prints is thrown away
    low, high = sorted((read_from, write_to))
    for kept, end in ((2, low), (low, high), (high, 1024)):
        os.closerange(kept + 1, end)
    sys.path.clear()
    sys.set_int_max_str_digits(0)  # integers travel as digits
    # At the first limit of computing time the kernel sends SIGXCPU, which nothing can catch or block here: no system
    # call sets a handler or a mask. SIGKILL then means that the machine ended the process.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"system calls cannot be limited on {machine}; one of {', '.join(ARCHITECTURES)} was expected")
    instructions = ctypes.create_string_buffer(system_call_filter(*ARCHITECTURES[machine]))
    program = _Program(len(instructions) // 8, ctypes.addressof(instructions))
    for arguments in (
        (PR_SET_PDEATHSIG, signal.SIGKILL, 0),
        (PR_SET_NO_NEW_PRIVS, 1, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)),
    ):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}: {os.strerror(ctypes.get_errno())}")


def system_call_filter(column: int, architecture: int) -> bytes:
    """Returns a program for the kernel's filter: system calls that are not ALLOWED fail with EPERM."""
    numbers = [of[column] for of in ALLOWED.values() if of[column] >= 0]
    instructions = [
        (LOAD_WORD, 0, 0, AT_ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, RET_KILL),
        (LOAD_WORD, 0, 0, AT_NUMBER),
        *((JUMP_IF_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)),
        (RETURN, 0, 0, RET_EPERM),
        (RETURN, 0, 0, RET_ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def run(limits: tuple[int, int]) -> int:
    """Start the two processes and wait for them. Returns the verdict."""
    sides = [*os.pipe(), *os.pipe()]
    answerer = os.fork() or answer(sides[0], sides[3], limits)
    examiner = os.fork() or examine(sides[2], sides[1], limits)
    os.closerange(3, 1024)
    verdict = os.waitstatus_to_exitcode(os.waitpid(examiner, 0)[1])
    os.kill(answerer, signal.SIGUSR1)
    status = os.waitstatus_to_exitcode(os.waitpid(answerer, 0)[1])
    if verdict < 0:
        return KILLED if verdict == -signal.SIGKILL else WRONG
    if verdict != ENDED:
        return verdict
    if status == -signal.SIGKILL:
        return KILLED
    # Other signals come from limits and crashes, but for the one sent above, to code that runs on without its channel.
    return WRONG if status == GAVE_UP or (status < 0 and status != -signal.SIGUSR1) else FORGED


def main() -> None:
    """Answer each request, a line of JSON, with its verdict, one of WORDS. This process never reads one."""
    for name in MODULES:
        importlib.import_module(name)
    share()
    limits = int(sys.argv[1]), int(sys.argv[2])
    while (verdict := run(limits)) in WORDS:
        os.write(1, WORDS[verdict])


if __name__ == "__main__":
    main()
