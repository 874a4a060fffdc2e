"""The places of a group's ranks: reserved on the cluster, waited for, and kept while the group is replaced."""

import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from cluster.connection import Bundle, NoPlaceError, in_words, rooms
from cluster.messages import ANSWER_SECONDS, claims_of_others, send_claim, withdraw_claim
from training.notices import say, waiting

POLL_SECONDS = 1.0  # between checks for places; short, since Ctrl-C is noticed only in between
LINE_SECONDS = 30.0  # between two lines about missing places
CLAIM_SECONDS = 10.0  # if a claim has not changed for this long, its job has ended
MAX_LOST_NAMED = 3  # the most lost machines that such a line names


class Places:
    """Places for the ranks of a group: reserved once, and kept while the group is replaced after a loss. Otherwise
    another job that waits for places would take them. When a machine is lost, Ray moves its places to another as
    soon as there is one. Jobs that wait for their first places leave that machine to the job that had places before.
    """

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None
        self._num_ranks = 0
        self._had_places = False
        self._claims = dict[str, tuple[int, float]]()  # by other job: the last number, and when it was first read

    def reserve(self, num_ranks: int, bundle: Bundle, wait_seconds: float) -> PlacementGroup:
        """Return the ranks' places once all of them are on machines that answer. If a different number of places was
        reserved before, free those first. While waiting, report every half minute what is missing.

        Raises:
            NoPlaceError: the places did not become available in time, and have been released; the message says what is
                needed and what there is.
        """
        needed = f"{num_ranks} worker{'s' if num_ranks > 1 else ''} with {in_words(bundle)} each"
        begun, said_at = time.monotonic(), 0.0
        if self._num_ranks != num_ranks:
            self.free()
        try:
            with waiting() as wait_for:
                while not self._are_there(num_ranks, bundle):
                    now = time.monotonic()
                    left = wait_seconds - (now - begun)
                    if left < 0:
                        why = _why_missing(self._group, num_ranks, bundle)
                        self.free()
                        raise NoPlaceError(f"{needed} could not be placed within {wait_seconds:.0f} s: {why}")
                    if self._had_places:
                        send_claim(round(now))
                    if not said_at or now - said_at > LINE_SECONDS:
                        said_at, why = now, _why_missing(self._group, num_ranks, bundle)
                        notice = f"waiting up to {left:.0f} s for places of {needed}: {why}"
                        wait_for(notice)
                        say(notice)
        finally:
            if self._had_places:
                withdraw_claim()
        assert self._group is not None
        self._had_places = True
        return self._group

    def _are_there(self, num_ranks: int, bundle: Bundle) -> bool:
        """Wait a moment for the places. Returns False if one is missing, or is on a machine that does not answer."""
        if not self._had_places and self._others_come_first():
            self.free()
            time.sleep(POLL_SECONDS)
            return False
        if self._group is None:
            self._group, self._num_ranks = placement_group([dict(bundle)] * num_ranks, strategy="PACK"), num_ranks
        if not self._group.wait(POLL_SECONDS):
            return False
        if next(_silent_machines(self._group), ""):
            time.sleep(POLL_SECONDS)
            return False
        return True

    def _others_come_first(self) -> bool:
        """Whether another job has lost its places and still claims new ones."""
        now, claims = time.monotonic(), claims_of_others()
        self._claims = {
            job: self._claims[job] if job in self._claims and self._claims[job][0] == number else (number, now)
            for job, number in claims.items()
        }
        left = [job for job, (_, read_at) in self._claims.items() if now - read_at > CLAIM_SECONDS]
        for job in left:
            withdraw_claim(job)
        return len(self._claims) > len(left)

    def free(self) -> None:
        """Give the places back, and end any processes still running in them, including stopped ones."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def is_placed(group: PlacementGroup) -> bool:
    """Whether Ray has given up none of the machines with a group's places. True if Ray's head does not answer."""
    try:
        return str(placement_group_table(group)["state"]) == "CREATED"
    except RayError:
        return True


def nodes_of(group: PlacementGroup) -> list[str]:
    """Return the node of each of a group's bundles; "" for a bundle without a place."""
    node_of_bundle: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [node_of_bundle[bundle] for bundle in sorted(node_of_bundle)]


def _silent_machines(group: PlacementGroup) -> Iterator[str]:
    """Yield the addresses of machines that hold places and do not answer, which Ray may not have noticed yet."""
    placed = set(nodes_of(group))
    addresses = [
        (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["NodeID"] in placed
    ]
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:  # all at once, or claims would lapse meanwhile
        for (host, _), answers in zip(addresses, pool.map(_answers, addresses), strict=True):
            if not answers:
                yield str(host)


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _why_missing(group: PlacementGroup | None, num_ranks: int, bundle: Bundle) -> str:
    """Say why ranks have no places yet: machines are lost or do not answer, or other jobs hold the places."""
    if group is None:
        return "a job that has lost its own places comes first"
    try:
        if is_placed(group):
            silent = ", ".join(sorted(set(_silent_machines(group))))
            return f"no answer from {silent}" if silent else "the machines have just answered"
        nodes: Mapping[Any, Any] = internal_kv.internal_kv_get_gcs_client().get_all_node_info(timeout=ANSWER_SECONDS)
        free_on: Mapping[str, Mapping[str, float]] = available_resources_per_node()
        placed = nodes_of(group)
    except RayError:
        return "Ray's head does not answer"
    living = {key.hex(): node for key, node in nodes.items() if node.state == node.ALIVE}
    room = [number for number in rooms(bundle, [node.resources_total for node in living.values()]) if number]
    there_is = f"the cluster's {len(room)} machine{'s have' if len(room) != 1 else ' has'} room for {sum(room)}"
    if sum(room) >= num_ranks:
        free = sum(rooms(bundle, [free_on.get(key, {}) for key in living])) + sum(node in living for node in placed)
        if free >= num_ranks:
            return f"{there_is}, and enough of it is free; Ray has not assigned it yet"
        return f"{there_is}, of which {free} {'is' if free == 1 else 'are'} free; other jobs hold the rest"
    returned = {node.node_manager_address for node in living.values()}
    lost = [
        node
        for node in sorted(nodes.values(), key=lambda node: -node.end_time_ms)
        if node.state == node.DEAD and any(rooms(bundle, [node.resources_total]))
        if node.node_manager_address not in returned
    ]
    named = [
        f"{node.node_manager_hostname} ({node.node_manager_address}) since"
        f" {time.strftime('%H:%M:%S', time.localtime(node.end_time_ms / 1000))}"
        for node in lost[:MAX_LOST_NAMED]
    ]
    return f"{there_is}{'; lost: ' if named else ''}{', '.join(named)}"
