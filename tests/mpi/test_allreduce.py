"""All-reduces over MPI ranks by every available library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist

from aladdin_mpi.allreduce import choose, horovod
from aladdin_mpi.allreduce.base import AllReduce
from aladdin_mpi.allreduce.messages import RingAllReduce, SingleAllReduce
from aladdin_mpi.allreduce.torch_distributed import TorchAllReduce
from aladdin_mpi.errors import UserError, WaitTimeoutError
from aladdin_mpi.flat.layout import cut
from aladdin_mpi.flat.unused import UnusedMarks, joined, shifted
from aladdin_mpi.transport.collectives import allreduce_bytes
from aladdin_mpi.transport.mpi.engine import MpiTransport
from tests.allreduce_lab import rounds_alike, sums_are_right
from tests.messages import naming

CPU, META = torch.device("cpu"), torch.device("meta")
FP32, BF16 = torch.float32, torch.bfloat16
PATIENCE = 30.0
TAG = 3000

needs_horovod = pytest.mark.skipif(
    horovod.obstacle(CPU, FP32) is not None, reason=horovod.obstacle(CPU, FP32) or ""
)
KINDS = [
    ("ring", FP32),
    ("mpi", FP32),
    ("mpi", BF16),
    ("torch", FP32),
    ("torch", BF16),
    pytest.param("horovod", FP32, marks=needs_horovod),
]
Make = Callable[..., AllReduce]


@pytest.fixture(scope="module")
def transport() -> Iterator[MpiTransport]:
    transport = MpiTransport(timeout=PATIENCE)
    yield transport
    transport.close()


@pytest.fixture
def make(transport: MpiTransport) -> Iterator[Make]:
    """Return the result of `choose.make` for the transport, closed at the end of the test."""
    made: list[AllReduce] = []

    def make(name: str, dtype: torch.dtype, device: torch.device = CPU) -> AllReduce:
        made.append(choose.make(name, transport, device, dtype))
        return made[-1]

    yield make
    transport.timeout = PATIENCE
    transport.wait(transport.ibarrier())
    for one in made:
        one.close()


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_all_reduce_sums_values_of_all_ranks(
    transport: MpiTransport, make: Make, name: str, dtype: torch.dtype
) -> None:
    reducer = make(name, dtype)
    assert reducer.name == name
    sums_are_right(transport, reducer)


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_all_reduce_marks_parameters_no_rank_uses(
    transport: MpiTransport, make: Make, name: str, dtype: torch.dtype
) -> None:
    sizes = [700, 1, 0, 5000, 3, 60_000]
    layout = cut(sum(sizes), 0, bucket_mb=0.02, shard_mb=10.0)
    marks, reducer = UnusedMarks(sizes, layout), make(name, dtype)
    # No rank uses the fourth parameter; only the last rank uses the second, with gradient -0.0.
    unused = {3} if transport.rank == transport.size - 1 else {1, 3}
    gradient = torch.full((layout.numel,), -0.0)
    gradient[704:].fill_(1.0)
    gradient[701:5701] = 0.0
    for bucket in layout.buckets:
        marks.write(bucket, bucket.of(gradient), unused)
    unused_parts = []
    for bucket in layout.buckets:
        total = reducer.start(bucket.of(gradient), bucket.index).wait()
        unused_parts += shifted(marks.read(bucket, total), bucket.start)
    assert joined(unused_parts) == [slice(701, 5701)]


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_all_reduce_is_bit_identical_on_all_ranks(
    transport: MpiTransport, make: Make, name: str, dtype: torch.dtype
) -> None:
    rounds_alike(transport, make(name, dtype))


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_all_reduce_of_meta_tensors_sends_as_many_bytes(
    transport: MpiTransport, make: Make, name: str, dtype: torch.dtype
) -> None:
    """Timed computing: values without data, with real messages."""
    reducer = make(name, dtype, META)
    before = transport.traffic.bytes_sent
    reducer.start(torch.ones(60_000, device="meta"), 0).wait()
    sent = transport.traffic.bytes_sent - before
    assert sent == allreduce_bytes(60_000 * dtype.itemsize, transport.size)


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_all_reduce_measures_its_waiting_time(
    transport: MpiTransport, make: Make, name: str, dtype: torch.dtype
) -> None:
    reducer = make(name, dtype)
    late = transport.rank == transport.size - 1
    transport.wait(transport.ibarrier())
    before = transport.traffic.waiting
    transport.sleep(0.5 if late else 0.0)
    reducer.start(torch.ones(1000), 0).wait()
    waited = transport.traffic.waiting - before
    assert late or waited > 0.25


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_all_reduce_wait_times_out(
    transport: MpiTransport, make: Make, name: str, dtype: torch.dtype
) -> None:
    reducer = make(name, dtype)
    last = transport.size - 1
    if transport.rank == last:  # it takes part after the others have timed out
        for rank in range(last):
            transport.wait(transport.irecv(torch.zeros(1), rank, TAG))
        pending = reducer.start(torch.ones(1000), 7)
    else:
        pending = reducer.start(torch.ones(1000), 7)
        transport.timeout = 0.3
        with pytest.raises(WaitTimeoutError, match=naming(f"rank {transport.rank} ", "0.3 s")):
            pending.wait()
        transport.timeout = PATIENCE
        transport.wait(transport.isend(torch.zeros(1), last, TAG))
    pending.wait()


def test_auto_all_reduce_is_a_ring_between_hosts_without_gpus(
    transport: MpiTransport, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make("auto", FP32).describe() == "MPI: all-reduce in float32"
    monkeypatch.setattr(transport, "hosts", list(range(transport.size)))
    reducer = make("auto", FP32)
    assert reducer.describe() == (
        "MPI: messages around a ring, added in float32; up to 512 KB MPI: all-reduce in float32"
    )
    used = []
    for kind in (SingleAllReduce, RingAllReduce):
        start = kind.start

        def noted(self: Any, values: torch.Tensor, key: int, start: Any = start) -> Any:
            used.append(type(self))
            return start(self, values, key)

        monkeypatch.setattr(kind, "start", noted)
    begun = [reducer.start(torch.ones(numel), key) for key, numel in enumerate((7, 200_000))]
    assert all(bool((pending.wait() == transport.size).all()) for pending in begun)
    assert used == [SingleAllReduce, RingAllReduce]
    assert make("auto", BF16).describe() == "MPI: messages in bfloat16, added in float32"


# -- torch.distributed ----------------------------------------------------------------
def test_torch_all_reduce_destroys_its_process_group(transport: MpiTransport) -> None:
    for _ in range(2):
        reducer = choose.make("torch", transport, CPU, FP32)
        assert reducer.describe() == "torch.distributed over gloo: all-reduce in float32"
        reducer.close()
        assert not dist.is_initialized()


def test_torch_all_reduce_refuses_a_process_group_of_the_program(transport: MpiTransport) -> None:
    own = TorchAllReduce(transport, CPU, FP32)
    with pytest.raises(
        UserError, match=naming("torch:", "torch.distributed", "destroy_process_group")
    ):
        choose.make("torch", transport, CPU, FP32)
    assert dist.is_initialized()
    own.close()


# -- Horovod --------------------------------------------------------------------------
@needs_horovod
def test_horovod_restarts_and_serves_several_all_reduces(transport: MpiTransport) -> None:
    for _ in range(2):
        first = choose.make("horovod", transport, CPU, FP32)
        second = choose.make("horovod", transport, CPU, FP32)
        assert first.describe().startswith("Horovod 0.28.1 over MPI")
        first.close()
        sums_are_right(transport, second, turns=1)
        transport.wait(transport.ibarrier())
        second.close()


def test_horovod_refuses_bf16(transport: MpiTransport) -> None:
    with pytest.raises(UserError, match=naming("horovod:", "torch.bfloat16", "--wire fp32")):
        choose.make("horovod", transport, CPU, BF16)


def test_horovod_missing_on_one_rank_is_an_error_on_all(
    transport: MpiTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = transport.rank == transport.size - 1
    monkeypatch.setattr(horovod, "obstacle", lambda *_: "is broken" if broken else None)
    reason = "is broken" if broken else f"1 of {transport.size} ranks"
    with pytest.raises(UserError, match=naming("horovod:", reason)):
        choose.make("horovod", transport, CPU, FP32)
