"""Three members in processes of their own, under faults, while clients write all four kinds and read linearizably.

In the end every member has every acknowledged write, once; all have the same; and single-key histories could have
happened one operation at a time. Control: a journal that is told synced before it is loses writes when all are killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_cluster import FAULTS, FaultyCluster

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FaultyCluster]:
    cluster = FaultyCluster(tmp_path)
    yield cluster
    cluster.end()


def test_a_cluster_under_faults_loses_and_doubles_nothing(cluster: FaultyCluster) -> None:
    cluster.run(3, seed=1, kinds=("kill", "all", "one-way"))
    assert len(cluster.done) == 3
    cluster.check()


@pytest.mark.campaign
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("seed", range(5))
def test_two_hundred_faults(cluster: FaultyCluster, seed: int) -> None:
    cluster.run(48, seed)
    assert set(cluster.done) == set(FAULTS)
    cluster.check()


@pytest.mark.campaign
def test_acknowledgements_before_a_sync_are_caught(tmp_path: Path) -> None:
    cluster = FaultyCluster(tmp_path, lazy=True)
    try:
        with pytest.raises(AssertionError, match="lost|damaged|differs|linearizable"):
            cluster.run(6, seed=3, kinds=("all",))
            cluster.check()
    finally:
        cluster.end()
