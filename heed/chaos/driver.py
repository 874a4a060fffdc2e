"""`heed run` as a separate process, which a campaign kills and restarts as an operator would."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from heed.chaos.result import LOSS


class Driver:
    """One run of a command in its own process group; its output is appended to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log, self._start_of_output = log, log.stat().st_size if log.exists() else 0
        self.was_killed = False
        with log.open("a") as file:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """The output of this process, without that of earlier ones."""
        with self.log.open("rb") as file:
            file.seek(self._start_of_output)
            return file.read().decode(errors="replace")

    @property
    def num_losses(self) -> int:
        """How often it has reported lost workers and continued."""
        return len(LOSS.findall(self.output))

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def has_finished(self) -> bool:
        return self.process.poll() == 0

    @property
    def was_explained(self) -> bool:
        """Whether it ended as documented: with one line that says what to do, without a traceback."""
        return not self.is_running and "Traceback (most recent call last)" not in self.output

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "")

    def kill(self) -> None:
        self.was_killed = True
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


StartDriver = Callable[[], Driver]
