"""A cache with a limit on the bytes that its values take, not on their number."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """Keeps the most recently used values, up to `max_bytes` in total; it never keeps a larger value. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        with self._lock:
            self._remove(key)
            if num_bytes > self.max_bytes:
                return
            self._kept[key] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self.max_bytes:
                self._remove(next(iter(self._kept)))

    def remove(self, key: Key) -> None:
        with self._lock:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        _, num_bytes = self._kept.pop(key, (None, 0))
        self.num_bytes -= num_bytes
