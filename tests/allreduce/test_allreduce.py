"""All-reduce in simulation, and selection of the all-reduce backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aladdin_mpi.allreduce import choose
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport import collectives
from aladdin_mpi.transport.virtual.engine import VirtualTransport
from tests.allreduce_lab import rounds_alike, sums_are_right
from tests.virtual_lab import lab, run

CPU = torch.device("cpu")
META = torch.device("meta")
DTYPES = (torch.float32, torch.bfloat16)
KINDS = [("mpi", torch.float32), ("ring", torch.float32), ("mpi", torch.bfloat16)]
RANKS = (1, 2, 3, 5, 8, 16)


@pytest.mark.sample(8)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "dtype"), KINDS)
@pytest.mark.parametrize(
    ("cluster", "seed"),
    [(lab(2), 0), (lab(2), 1), (lab(2), 2), (lab(1, delay_us=300), 0)],
    ids=["seed 0", "seed 1", "seed 2", "delays"],
)
def test_allreduce_sums_buckets_of_all_ranks(
    ranks: int, name: str, dtype: torch.dtype, cluster: Cluster, seed: int
) -> None:
    def main(transport: VirtualTransport) -> None:
        sums_are_right(transport, choose.make(name, transport, CPU, dtype))

    run(ranks, main, cluster, seed)


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_allreduce_is_bit_identical_on_all_ranks(ranks: int, name: str, dtype: torch.dtype) -> None:
    run(ranks, lambda t: rounds_alike(t, choose.make(name, t, CPU, dtype)))


def test_allreduce_adds_bf16_in_fp32() -> None:
    """In bf16, 256 + 1 is 256, however often 1 is added."""

    def main(transport: VirtualTransport) -> float:
        values = torch.full((5,), 256.0 if transport.rank == 0 else 1.0)
        total = choose.make("mpi", transport, CPU, torch.bfloat16).start(values, 0).wait()
        return float(total[4])

    assert run(5, main) == [260.0] * 5
    assert float(sum((torch.ones(1, dtype=torch.bfloat16) for _ in range(4)), 256)) == 256.0


@pytest.mark.parametrize("ranks", [5, 8, 40])
def test_ring_of_messages_takes_same_time_as_engine_allreduce(ranks: int) -> None:
    def main(transport: VirtualTransport, name: str) -> tuple[float, int]:
        reducer = choose.make(name, transport, META)
        pending = [reducer.start(torch.ones(1_000_000, device=META), key) for key in range(3)]
        for one in pending:
            one.wait()
        return transport.now(), transport.traffic.bytes_sent

    own = run(ranks, lambda t: main(t, "mpi"), lab(ranks))
    ring = run(ranks, lambda t: main(t, "ring"), lab(ranks))
    assert [sent for _, sent in ring] == [sent for _, sent in own]
    assert [end for end, _ in ring] == pytest.approx([end for end, _ in own], rel=0.02)


@pytest.mark.parametrize("name", ["mpi", "ring"])
def test_ring_leaves_each_host_once(name: str) -> None:
    """Eight ranks, two per host, placed cyclically."""

    def main(transport: VirtualTransport) -> dict[str, list[int]]:
        reducer = choose.make(name, transport, META)
        reducer.start(torch.ones(8_000_000, device=META), 0).wait()
        transport.wait(transport.ibarrier())
        return transport.carried()

    carried = run(8, main, Cluster(hosts=4, placement="cyclic"))[0]
    assert carried["out"] == [collectives.allreduce_bytes(32_000_000, 8)] * 4


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_of_sizes_takes_same_time_and_bytes_as_of_values(
    ranks: int, dtype: torch.dtype
) -> None:
    def main(transport: VirtualTransport, device: torch.device) -> tuple[float, int, float]:
        reducer = choose.make("auto", transport, device, dtype)
        pending = []
        for key in range(3):
            transport.sleep(0.01)
            pending.append(reducer.start(torch.ones(100_000, device=device), key))
        for one in pending:
            one.wait()
        return transport.now(), transport.traffic.bytes_sent, transport.traffic.waiting

    real = run(ranks, lambda t: main(t, CPU))
    assert run(ranks, lambda t: main(t, META)) == real
    nbytes = 100_000 * dtype.itemsize
    whole = 3 * collectives.allreduce_bytes(nbytes, ranks)
    assert all(sent == pytest.approx(whole, rel=0.01) for _, sent, _ in real)
    assert all(waiting > 0 for _, _, waiting in real)


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_overlaps_with_computing(dtype: torch.dtype) -> None:
    """Nobody waits for a bucket that started before long computing."""

    def main(transport: VirtualTransport) -> tuple[float, float]:
        pending = choose.make("mpi", transport, CPU, dtype).start(torch.ones(250_000), 0)
        transport.sleep(1.0)
        pending.wait()
        return transport.traffic.waiting, transport.now()

    assert run(4, main) == [(0.0, 1.0)] * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_counts_waiting_for_slowest_rank(dtype: torch.dtype) -> None:
    def main(transport: VirtualTransport) -> float:
        transport.sleep(0.5 if transport.rank == 1 else 0.0)
        choose.make("mpi", transport, CPU, dtype).start(torch.ones(1000), 0).wait()
        return transport.traffic.waiting

    waits = run(3, main)
    assert waits[0] == pytest.approx(0.5, abs=0.01)
    assert waits[1] == pytest.approx(0.0, abs=0.01)


# -- backend selection --------------------------------------------------------------
@pytest.mark.parametrize("name", ["horovod", "torch"])
def test_virtual_time_rejects_real_allreduce_backends(name: str) -> None:
    with pytest.raises(UserError, match=rf"all-reduce: .*\bauto, ring or mpi\b.*\b{name}\b"):
        run(1, lambda t: choose.make(name, t, CPU))


def test_backend_is_refused_on_ranks_that_have_not_failed(tmp_path: Path) -> None:
    """The others end with the reason, not with an error about the missing answer."""
    errors = []

    def main(transport: VirtualTransport) -> None:
        transport.sleep(1.0)
        transport.models_time = False
        with pytest.raises(UserError) as refused:
            choose.make("torch", transport, torch.device("cpu"))
        errors.append(str(refused.value))

    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        run(3, main, lab(3, failures={1: 0.5}))
    finally:
        torch.distributed.destroy_process_group()
    assert len(errors) == 2
    assert all("already has a torch.distributed process group" in error for error in errors)


def test_unknown_allreduce_backend_is_rejected() -> None:
    with pytest.raises(UserError, match=r"all-reduce: .*auto, ring, mpi, horovod, torch.*'nccl'"):
        run(1, lambda t: choose.make("nccl", t, CPU))


@pytest.mark.parametrize("name", ["auto", "mpi"])
def test_allreduce_describe_names_backend_and_dtype(name: str) -> None:
    def main(transport: VirtualTransport) -> list[str]:
        return [choose.make(name, transport, CPU, dtype).describe() for dtype in DTYPES]

    ((fp32, bf16),) = run(1, main)
    assert "all-reduce" in fp32 and "float32" in fp32 and "bfloat16" not in fp32
    assert "messages" in bf16 and "bfloat16" in bf16 and "float32" in bf16


# -- conventional volumes -------------------------------------------------------------
def test_collective_volumes_match_ring() -> None:
    assert collectives.allreduce_bytes(1000, 4) == 1500
    assert collectives.allgather_bytes(1000, 4) == 3000
    assert collectives.partial_bytes(1000, 4) == 750
    for count in (
        collectives.allreduce_bytes,
        collectives.allgather_bytes,
        collectives.partial_bytes,
    ):
        assert count(1000, 1) == 0


def test_virtual_collectives_send_conventional_volumes() -> None:
    def main(transport: VirtualTransport) -> list[int]:
        sent, traffic = [], transport.traffic
        for start in (
            lambda: transport.iallreduce(torch.ones(30_000)),
            lambda: transport.iallgather(torch.ones(30_000), torch.ones(90_000)),
            lambda: transport.ialltoall(torch.ones(30_000), torch.ones(30_000)),
        ):
            before = traffic.bytes_sent
            transport.wait(start())
            sent.append(traffic.bytes_sent - before)
        return sent

    wanted = [
        collectives.allreduce_bytes(120_000, 3),
        collectives.allgather_bytes(120_000, 3),
        collectives.partial_bytes(120_000, 3),
    ]
    assert run(3, main) == [wanted] * 3
