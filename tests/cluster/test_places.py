"""What a group that has no places yet is said to wait for, and a rank that waits for a server."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster import places
from cluster.calls import Vigil
from cluster.config import ClusterConfig
from cluster.messages import Beat


@pytest.mark.parametrize(
    ("free_cpus", "said"),
    [
        (1.0, "room for 2, of which 1 is free; other jobs hold the rest"),
        (2.0, "room for 2, and enough of it is free; Ray has not assigned it yet"),
    ],
)
def test_other_jobs_are_blamed_only_if_they_hold_places(
    monkeypatch: pytest.MonkeyPatch, free_cpus: float, said: str
) -> None:
    node = SimpleNamespace(state=1, ALIVE=1, DEAD=2, resources_total={"CPU": 2.0}, node_manager_address="10.0.0.1")
    client = SimpleNamespace(get_all_node_info=lambda timeout: {b"\x01": node} if timeout else {})
    monkeypatch.setattr(places.internal_kv, "internal_kv_get_gcs_client", lambda: client)
    monkeypatch.setattr(places, "available_resources_per_node", lambda: {"01": {"CPU": free_cpus}})
    monkeypatch.setattr(places, "is_placed", lambda _: False)
    monkeypatch.setattr(places, "nodes_of", lambda _: [])
    group: Any = object()
    assert places._why_missing(group, 2, {"CPU": 1.0}) == f"the cluster's 1 machine has {said}"


def test_a_rank_that_waits_for_a_server_is_not_stuck() -> None:
    vigil = Vigil(ClusterConfig(stall_seconds=10), ["a", "b"], {})
    notice = "waiting up to 600 s for http://host/score: status 500 (Internal Server Error)"
    for number in range(1, 9):
        vigil._count({"a": Beat(number, 5), "b": Beat(number, 3, awaited=notice)}, ["a", "b"], 5.0)
        assert (vigil.is_stalled, vigil.awaited) == (False, notice)
    for number in range(9, 13):
        vigil._count({"a": Beat(number, 5), "b": Beat(number, 3)}, ["a", "b"], 5.0)
    assert (vigil.is_stalled, vigil.awaited) == (True, "")
