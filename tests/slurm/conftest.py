"""One Slurm cluster for all tests in this directory, which are skipped if none can be started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import slurm_cluster
from tests.slurm_cluster import SlurmCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    reason = slurm_cluster.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    with slurm_cluster.cluster(nodes=3) as made:
        yield made
