"""Typed handles to objects on ranks. A call names the method that it runs, as in

    learners = group.put("ppo", Learner, config, ...)               # Remote[Learner]: one on every rank
    learners.call_all(Learner.finish_saving)                        # the same arguments for every rank
    learners.call_split(Learner.update_policy, [(shard, rate, update), ...])    # each rank's own

so mypy checks arguments and results, and an editor jumps from the call to the method. Only the method's name is sent.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, TypeVarTuple

if TYPE_CHECKING:  # `Local` needs no Ray (`python -m benchmarks.gpu`)
    from cluster.calls import Calls, Ranks


class Closeable(Protocol):
    def close(self) -> None: ...


Kept = TypeVar("Kept", bound=Closeable)
Taker = TypeVar("Taker", bound=Closeable)
Given = TypeVar("Given")
Result = TypeVar("Result")
P = ParamSpec("P")
Arguments = TypeVarTuple("Arguments")

_numbers = itertools.count()

Pending = Callable[[], Result]  # waits for something that was started; each call returns the same result
Call = tuple[Sequence[Any], Mapping[str, Any]]  # positional arguments, and those by name


class Handle(ABC, Generic[Kept]):
    """One object of a class on each of `num_ranks` ranks. A rank works through its calls in the order they started."""

    num_ranks: int

    @abstractmethod
    def _start(self, method: Callable[..., Any], arguments: Sequence[Call]) -> Pending[list[Any]]:
        """Start a method on the first ranks, each with its own arguments. The returned function waits for results by
        rank.
        """

    @abstractmethod
    def pass_on(
        self,
        give: Callable[[Kept], Iterator[Given]],
        to: "Handle[Taker]",
        take: Callable[[Taker, Iterable[Given]], object],
    ) -> Pending[object]:
        """Call `take` on the objects of `to` with the values that `give` yields here, without going through the driver.

        If the same ranks keep both objects, each rank hands over its own values, one at a time. Otherwise every rank
        calls `give`, and rank 0's values go to every rank of `to` through Ray's object store, one object each. This
        method returns once all calls of `give` have ended. Receivers process the values after calls already queued; the
        returned function waits for that.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the objects and forget them."""

    def start_all(
        self, method: Callable[Concatenate[Kept, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[list[Result]]:
        """Start a method on every rank with the same arguments. The returned function waits for results by rank."""
        return self._start(method, [(args, kwargs)] * self.num_ranks)

    def start_split(
        self, method: Callable[[Kept, *Arguments], Result], args_of_rank: Sequence[tuple[*Arguments]]
    ) -> Pending[list[Result]]:
        """Like `start_all`, with separate arguments for each rank."""
        assert len(args_of_rank) == self.num_ranks, f"{len(args_of_rank)} arguments for {self.num_ranks} ranks"
        return self._start(method, [(args, {}) for args in args_of_rank])

    def start_first(
        self, method: Callable[Concatenate[Kept, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[list[Result]]:
        """Like `start_all`, but only on rank 0."""
        return self._start(method, [(args, kwargs)])

    def call_all(
        self, method: Callable[Concatenate[Kept, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> list[Result]:
        """Call `start_all` and wait for the results."""
        return self.start_all(method, *args, **kwargs)()

    def call_split(
        self, method: Callable[[Kept, *Arguments], Result], args_of_rank: Sequence[tuple[*Arguments]]
    ) -> list[Result]:
        """Call `start_split` and wait for the results."""
        return self.start_split(method, args_of_rank)()


class Remote(Handle[Kept]):
    """Objects on the ranks of a `WorkerGroup`, which makes the handle (`WorkerGroup.put`).

    Raises:
        WorkerError: a call failed; the message names stage, method, rank and the first cause.
    """

    def __init__(self, ranks: "Ranks", stage: str, key: str) -> None:
        self.ranks, self.stage, self.num_ranks, self._key = ranks, stage, ranks.num_ranks, key

    @classmethod
    def put(
        cls, ranks: "Ranks", stage: str, factory: Callable[P, Kept], *args: P.args, **kwargs: P.kwargs
    ) -> "Remote[Kept]":
        key = f"{stage}/{next(_numbers)}"
        from cluster.calls import Calls, stored_once

        sent = stored_once(args), stored_once(kwargs)
        references = tuple(actor.put.remote(key, factory, *sent) for actor in ranks.actors)
        Calls[None](ranks, stage, references)()
        return Remote(ranks, stage, key)

    def _start(self, method: Callable[..., Any], arguments: Sequence[Call]) -> "Calls[Any]":
        name, calls = _name_of(method), zip(self.ranks.actors, arguments, strict=False)
        return self._started(name, [actor.call.remote(self._key, name, *call) for actor, call in calls])

    def pass_on(
        self,
        give: Callable[[Kept], Iterator[Given]],
        to: Handle[Taker],
        take: Callable[[Taker, Iterable[Given]], object],
    ) -> Pending[object]:
        assert isinstance(to, Remote), f"a handle to ranks of a group was expected, not {to!r}"
        offer, receive = _name_of(give), _name_of(take)
        if to.ranks is self.ranks:
            handed = [a.hand_over.remote(self._key, offer, to._key, receive) for a in self.ranks.actors]
            self._started(offer, handed)()
            return lambda: None
        offered = self._started(offer, [a.offer.remote(self._key, offer) for a in self.ranks.actors])
        values, *_ = offered()
        return to._started(receive, [a.receive.remote(to._key, receive, *values) for a in to.ranks.actors])

    def close(self) -> None:
        self._started("close", [actor.drop.remote(self._key) for actor in self.ranks.actors])()

    def _started(self, name: str, references: Sequence[Any]) -> "Calls[Any]":
        from cluster.calls import Calls

        return Calls(self.ranks, f"{self.stage}.{name}", tuple(references))


class Local(Handle[Kept]):
    """An object in this process, called directly: one rank without Ray, for tests and measurements."""

    num_ranks = 1

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method; every call comes through here."""
        return getattr(self.kept, _name_of(method))(*args, **kwargs)

    def _start(self, method: Callable[..., Any], arguments: Sequence[Call]) -> Pending[list[Any]]:
        results = [self.run(method, *args, **kwargs) for args, kwargs in arguments]
        return lambda: results

    def pass_on(
        self,
        give: Callable[[Kept], Iterator[Given]],
        to: Handle[Taker],
        take: Callable[[Taker, Iterable[Given]], object],
    ) -> Pending[object]:
        assert isinstance(to, Local), f"a handle to an object of this process was expected, not {to!r}"
        to.run(take, self.run(give))
        return lambda: None

    def close(self) -> None:
        self.kept.close()


def _name_of(method: Callable[..., object]) -> str:
    name: str = method.__name__
    return name
