"""The state of a failed server is restored from its replica."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi import DataParallel
from aladdin_mpi.control.exchange import send_object
from aladdin_mpi.exchange import server_replica
from aladdin_mpi.exchange.server_replica import keeper_of
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run import summary, takeover
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster

FAILURE_TIME = 20.5
LR = 0.05
WORKERS = 3


@pytest.mark.parametrize(("servers", "expected"), [(1, [1]), (3, [1, 2, 0])])
def test_replica_is_kept_by_the_next_server(servers: int, expected: list[int]) -> None:
    assert [keeper_of(server, servers) for server in range(servers)] == expected


def train(transport: Transport, folder: Path, servers: int, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    run = DataParallel(
        module,
        transport=transport,
        servers=servers,
        samples=400,
        batch_size=4,
        lr=LR,
        bucket_mb=8e-6,
        compute_time=1.0,
        run_dir=folder,
        quiet=True,
        **settings,
    )
    for x, y in run.batches(data):
        nn.functional.mse_loss(module(x), y).backward()
        run.step()


class Spy:
    """Records what a server sends to its replica, and the state that is assembled without it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[int, list[dict[str, Any]]] = {}
        self.formers: list[MergedState] = []
        reconcile = takeover._reconcile
        monkeypatch.setattr(summary, "draw_curves", lambda *_: None)
        monkeypatch.setattr(server_replica, "send_object", self._send)

        def keep(merged: MergedState, of: Any) -> int:
            optimizer = merged.server["optimizer"]
            velocity = None if optimizer is None else optimizer["velocity"].clone()
            server = {**merged.server, "optimizer": {"velocity": velocity}}
            self.formers.append(MergedState(merged.model.clone(), {}, server))
            return reconcile(merged, of)

        monkeypatch.setattr(takeover, "_reconcile", keep)

    def _send(self, transport: Transport, state: dict[str, Any], *where: Any) -> Any:
        if transport.original_ranks[transport.rank] == 0:
            self.sent.setdefault(state["bucket"], []).append(state)
        return send_object(transport, state, *where)

    def newest(self, name: str) -> list[list[Tensor]]:
        """Return the last two states sent of each bucket of the failed server."""
        pick = (
            (lambda state: state["optimizer"]["velocity"])
            if name == "velocity"
            else (lambda state: state["values"])
        )
        return [[pick(state) for state in each[-2:]] for each in self.sent.values()]


def is_in(part: Tensor, vector: Tensor) -> bool:
    """Return whether a vector contains a part, bit for bit."""
    return any(torch.equal(window, part) for window in vector.unfold(0, len(part), 1))


@pytest.mark.sample(2)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("velocity", {"algorithm": "asp", "momentum": 0.9, "asp": {"momentum": "server"}}),
        ("velocity", {"algorithm": "async-diloco", "async_diloco": {"steps": 2}}),
        ("values", {"algorithm": "easgd"}),
    ],
)
def test_state_of_a_failed_server_is_restored_from_its_replica(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    servers: int,
    name: str,
    settings: dict[str, Any],
) -> None:
    spy = Spy(monkeypatch)
    cluster = Cluster(failures={0: FAILURE_TIME}).placed(servers)
    how = {**settings, "replicate_every": 1}
    VirtualCluster(servers + WORKERS, cluster, 0).run(
        lambda transport: train(transport, tmp_path / "run", servers, how)
    )
    merged = spy.formers[0]
    whole = merged.server["optimizer"]["velocity"] if name == "velocity" else merged.model
    assert spy.sent
    for last_two in spy.newest(name):
        assert all(part.any() for part in last_two)
        assert any(is_in(part, whole) for part in last_two)


def test_bucket_is_replicated_after_every_fourth_update(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    updates: Counter[int] = Counter()
    sent_at: dict[int, list[int]] = {}
    note = server_replica.ServerReplica.note

    def counted(self: server_replica.ServerReplica, bucket: Bucket) -> None:
        updates[bucket.index] += 1
        note(self, bucket)

    def send(transport: Transport, state: dict[str, Any], *where: Any) -> Any:
        sent_at.setdefault(state["bucket"], []).append(updates[state["bucket"]])
        return send_object(transport, state, *where)

    monkeypatch.setattr(server_replica.ServerReplica, "note", counted)
    monkeypatch.setattr(server_replica, "send_object", send)
    cluster = Cluster(failures={WORKERS: 1e6}).placed(1)  # after the end, so replicas exist
    VirtualCluster(1 + WORKERS, cluster, 0).run(
        lambda transport: train(
            transport, tmp_path / "run", 1, {"algorithm": "easgd", "replicate_every": 4}
        )
    )
    assert len(sent_at) > 1
    for bucket, numbers in sent_at.items():
        assert numbers == list(range(4, updates[bucket] + 1, 4))


def test_momentum_of_a_failed_server_restarts_without_a_replica(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spy = Spy(monkeypatch)
    how = {"algorithm": "asp", "momentum": 0.9, "asp": {"momentum": "server"}, "replicate_every": 0}
    VirtualCluster(2 + WORKERS, Cluster(failures={0: FAILURE_TIME}).placed(2), 0).run(
        lambda transport: train(transport, tmp_path / "run", 2, how)
    )
    merged = spy.formers[0]
    assert not spy.sent
    velocity = merged.server["optimizer"]["velocity"]
    assert velocity.any() and (velocity == 0).any()
