"""Finds which policies are connected by verdicts. Shape letters: V verdicts, P policies, B graphs."""

import numpy as np
import numpy.typing as npt
import scipy

from preferences.statistics.estimates import Ints

Truths = npt.NDArray[np.bool_]


def islands_of(num_policies: int, a_V: Ints, b_V: Ints) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of connected policies, each in ascending order, sorted by their first policy."""
    graph = scipy.sparse.coo_matrix((np.ones(len(a_V)), (a_V, b_V)), shape=(num_policies, num_policies))
    _, island_P = scipy.sparse.csgraph.connected_components(graph, directed=False)
    _, first = np.unique(island_P, return_index=True)
    return tuple(tuple(np.flatnonzero(island_P == island_P[place]).tolist()) for place in sorted(first))


def reaches(beats_BPP: Truths) -> Truths:
    """Returns [B, P, P] whether a chain of wins leads from i to j; every policy reaches itself."""
    num_policies = beats_BPP.shape[1]
    reached_BPP = beats_BPP | np.eye(num_policies, dtype=bool)
    for _ in range(max(1, int(np.ceil(np.log2(max(num_policies, 2)))))):
        reached_BPP = (reached_BPP.astype(np.float32) @ reached_BPP.astype(np.float32)) > 0
    return np.asarray(reached_BPP)
