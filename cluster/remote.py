"""Typed handles to objects on ranks. A call names the method that it runs, as in

    learners = group.put("ppo", Learner, config, ...)               # Remote[Learner]: one on every rank
    learners.call_all(Learner.finish_saving)                        # the same arguments for every rank
    learners.call_split(Learner.update_policy, [(shard, rate, update), ...])    # each rank's own

so mypy checks arguments and results, and an editor jumps from the call to the method. Only the method's name is sent.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, TypeVarTuple

from training.notices import say

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
MAX_LOSSES = 2  # of processes of a `Replaceable` one after the other, without a result

Pending = Callable[[], Result]  # waits for something that was started; each call returns the same result
Call = tuple[Sequence[Any], Mapping[str, Any]]  # positional arguments, and those by name
Start = Callable[[Any], Any]  # starts a call on the actor of a rank, and returns the reference to its result


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

    def settle(self, _calls: Pending[Any]) -> None:
        """Let a new object repeat none of the calls up to this one, whose results are known, but take what was last
        passed on before it. Does nothing where no lost object is made again.
        """

    def mend(self) -> None:
        """Make lost objects again now, not when something is next waited for. Does nothing where none is."""

    def start_from(
        self, _method: Callable[[Kept, *Arguments], object], _args_of_rank: Sequence[tuple[*Arguments]]
    ) -> None:
        """Call this method on each new object, before the calls that it repeats."""

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

    def __init__(self, ranks: "Ranks", stage: str, key: str, make: Start) -> None:
        """`make` makes the object on an actor."""
        self.ranks, self.stage, self.num_ranks = ranks, stage, ranks.num_ranks
        self._key, self._make = key, make

    @classmethod
    def put(
        cls, ranks: "Ranks", stage: str, factory: Callable[P, Kept], *args: P.args, **kwargs: P.kwargs
    ) -> "Remote[Kept]":
        key = f"{stage}/{next(_numbers)}"
        from cluster.calls import Calls, stored_once

        sent = stored_once(args), stored_once(kwargs)
        Calls[None](ranks, stage, [actor.put.remote(key, factory, *sent) for actor in ranks.actors])()
        return cls(ranks, stage, key, lambda actor: actor.put.remote(key, factory, *sent))

    def _start(self, method: Callable[..., Any], arguments: Sequence[Call]) -> "Calls[Any]":
        return self._started(_name_of(method), [self._calling(_name_of(method), *call) for call in arguments])

    def _calling(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Start:
        return lambda actor: actor.call.remote(self._key, name, args, kwargs)

    def pass_on(
        self,
        give: Callable[[Kept], Iterator[Given]],
        to: Handle[Taker],
        take: Callable[[Taker, Iterable[Given]], object],
    ) -> Pending[object]:
        assert isinstance(to, Remote), f"a handle to ranks of a group was expected, not {to!r}"
        offer, receive = _name_of(give), _name_of(take)
        if to.ranks is self.ranks:
            self._on_all(offer, lambda actor: actor.hand_over.remote(self._key, offer, to._key, receive))()
            return lambda: None
        values, *_ = self._on_all(offer, lambda actor: actor.offer.remote(self._key, offer))()
        return to._take(receive, values)

    def _take(self, receive: str, values: Sequence[Any]) -> "Calls[Any]":
        return self._on_all(receive, lambda actor: actor.receive.remote(self._key, receive, *values))

    def close(self) -> None:
        self._on_all("close", lambda actor: actor.drop.remote(self._key))()

    def _on_all(self, name: str, start: Start) -> "Calls[Any]":
        return self._started(name, [start] * self.num_ranks)

    def _started(self, name: str, starts: Sequence[Start]) -> "Calls[Any]":
        from cluster.calls import Calls

        references = [start(actor) for start, actor in zip(starts, self.ranks.actors, strict=False)]
        return Calls(self.ranks, f"{self.stage}.{name}", references)


@dataclass
class _Repeatable:
    """Calls that a new object repeats: `starts[rank]` does on its actor."""

    calls: "Calls[Any]"
    starts: Sequence[Start]
    is_passed_on: bool = False  # values of other ranks


class Replaceable(Remote[Kept]):
    """Objects of which a lost one is made again, in a new process on the same machine. It repeats the calls since the
    last settled ones with the same arguments; other ranks keep theirs, and may wait for it. A process that is lost
    again and again before anything is settled ends the group.
    """

    def __init__(self, ranks: "Ranks", stage: str, key: str, make: Start) -> None:
        super().__init__(ranks, stage, key, make)
        self._repeated, self._first = list[_Repeatable](), list[Start]()  # after `_first`, by rank
        self._num_lost = 0  # since something was settled
        ranks.replace = self._replace

    def settle(self, calls: Pending[Any]) -> None:
        places = [place for place, one in enumerate(self._repeated) if one.calls is calls]
        for place in places:  # none if a later call has been settled
            later = self._repeated[place + 1 :]
            passed_on = [one for one in self._repeated[:place] if one.is_passed_on]
            is_replaced = bool(later) and later[0].is_passed_on
            self._repeated, self._num_lost = [*([] if is_replaced else passed_on[-1:]), *later], 0

    def start_from(
        self, method: Callable[[Kept, *Arguments], object], args_of_rank: Sequence[tuple[*Arguments]]
    ) -> None:
        self._first = [self._calling(_name_of(method), args, {}) for args in args_of_rank]

    def mend(self) -> None:
        if self._repeated and self.ranks.is_open:
            self._repeated[-1].calls.mend()

    def _started(self, name: str, starts: Sequence[Start]) -> "Calls[Any]":
        calls = super()._started(name, starts)
        self._repeated.append(_Repeatable(calls, starts))
        return calls

    def _take(self, receive: str, values: Sequence[Any]) -> "Calls[Any]":
        calls = super()._take(receive, values)
        self._repeated[-1].is_passed_on = True
        return calls

    def close(self) -> None:
        super().close()
        self.ranks.replace = None

    def _replace(self, rank: int, why: str) -> bool:
        self._num_lost += 1
        if self._num_lost > MAX_LOSSES:
            return False
        say(f"{self.stage}: rank {rank} of {self.num_ranks} was lost: {why} A new process repeats what was under way")
        actor = self.ranks.renew(rank)
        self.ranks.begun[rank] += [start(actor) for start in (self._make, *self._first[rank : rank + 1])]
        for one in self._repeated:
            if rank < len(one.starts):
                one.calls.references[rank] = one.starts[rank](actor)
        return True


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
