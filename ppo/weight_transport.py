"""How the learners' weights reach the generators, never through the driver (`ppo.weight_transport`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cluster.remote import Handle, Pending, Remote
from ppo.config import PPOConfig
from ppo.generator import Generator
from ppo.learner import Learner

if TYPE_CHECKING:
    from cluster.group import WorkerGroup


class WeightTransport(Protocol):
    def advance_and_send(self) -> Pending[object]:
        """Advance the moving average and send the weights. The returned function waits until they have arrived."""
        ...

    def send(self) -> Pending[object]:
        """Send the weights as they are."""
        ...


@dataclass(frozen=True)
class Direct(WeightTransport):
    """On the same rank by a call, else through Ray's object store.

    Learners do not wait for generators that still sample: those take the weights in their turn, after the rollouts that
    were begun before and before those that are begun later.
    """

    learners: Handle[Learner]
    generators: Handle[Generator]

    def advance_and_send(self) -> Pending[object]:
        return self.learners.pass_on(Learner.advance_and_send, self.generators, Generator.receive)

    def send(self) -> Pending[object]:
        return self.learners.pass_on(Learner.send, self.generators, Generator.receive)


@dataclass(frozen=True)
class Broadcast(WeightTransport):
    """By one collective of the first learner and all generators; all of them take part at once."""

    learners: Remote[Learner]
    generators: Remote[Generator]

    @classmethod
    def open(cls, group: "WorkerGroup", learners: Remote[Learner], generators: Remote[Generator]) -> "Broadcast":
        """The first learner, of `group`, is rank 0; generators follow. Other learners have no part in it."""
        host, port = group.free_address()
        num_ranks = 1 + generators.num_ranks
        sender = learners.start_first(Learner.open_broadcast, host, port, 0, num_ranks)
        ends = [(host, port, rank, num_ranks) for rank in range(1, num_ranks)]
        from cluster.calls import wait_all

        wait_all(sender, generators.start_split(Generator.open_broadcast, ends))
        return cls(learners, generators)

    def advance_and_send(self) -> Pending[object]:
        return self._exchanged(Learner.advance_and_broadcast)

    def send(self) -> Pending[object]:
        return self._exchanged(Learner.broadcast_weights)

    def _exchanged(self, method: Callable[[Learner], None]) -> Pending[object]:
        from cluster.calls import wait_all

        wait_all(self.learners.start_all(method), self.generators.start_all(Generator.receive_broadcast))
        return lambda: None


def broadcasts(config: PPOConfig, learners: Handle[Learner], generators: Handle[Generator]) -> bool:
    """Whether weights go from group to group by broadcast: "auto" does between GPUs, unless generators are ahead."""
    if config.weight_transport != "auto":
        return config.weight_transport == "broadcast"
    if config.max_staleness:
        return False
    return all([*learners.call_all(Learner.on_gpu), *generators.call_all(Generator.on_gpu)])
