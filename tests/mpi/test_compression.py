"""Compressed gradients, and models sent as differences, over MPI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aladdin_mpi.codec.dgc import DeepGradientCompression
from aladdin_mpi.transport.mpi.engine import MpiTransport
from tests.compressed import Job, layout_of, run_rank


@pytest.fixture
def transport() -> Iterator[MpiTransport]:
    transport = MpiTransport(timeout=60.0)
    yield transport
    transport.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compression_over_mpi_loses_no_gradient(
    transport: MpiTransport, dtype: torch.dtype
) -> None:
    """Without blending, the global model is the mean of the local models, except for residuals."""
    workers = transport.size - 1
    settings = {"aladdin": {"alpha": 0.0, "pi": 1}, "weight_decay": 0.01}
    job = Job(ratio=0.05, servers=1, workers=workers, samples=200, settings=settings, dtype=dtype)
    job.segments = 2
    end = run_rank(job, transport)
    x = torch.cat([end.role.part(bucket) for bucket in layout_of(job).buckets])
    model = x.clone() if transport.rank == 0 else torch.zeros_like(x)
    locals_ = torch.zeros_like(x)
    if transport.rank:
        assert isinstance(end.codec, DeepGradientCompression)
        if end.codec.left is not None:  # otherwise there was no sample for this worker
            locals_ = (x + job.lr * end.codec.left) / workers
        else:
            locals_ = x / workers
    transport.wait(transport.iallreduce(model), transport.iallreduce(locals_))
    torch.testing.assert_close(model, locals_, rtol=1e-4, atol=1e-5)


def test_compressed_model_of_worker_equals_that_of_server(transport: MpiTransport) -> None:
    """With alpha = 1, a worker's model is the last one received, plus its own later steps."""
    settings = {"aladdin": {"alpha": 1.0, "pi": 1}}
    job = Job(ratio=0.01, servers=1, workers=transport.size - 1, samples=200, settings=settings)
    end = run_rank(job, transport)
    x = torch.cat([end.role.part(bucket) for bucket in layout_of(job).buckets])
    if transport.size > 2:
        return  # the other workers' last gradients arrive later
    model = x.clone()
    transport.wait(transport.ibroadcast(model, 0))
    assert torch.equal(x, model)


def test_timed_computing_with_compression_applies_every_gradient(transport: MpiTransport) -> None:
    job = Job(ratio=0.01, servers=1, workers=transport.size - 1, samples=200, timed=True)
    job.seconds = 0.005
    end = run_rank(job, transport)
    if transport.rank == 0:
        assert end.role.counts()["applied"] == 200 // job.batch


def test_empty_message_leaves_the_buffer_unchanged(transport: MpiTransport) -> None:
    """An unchanged model is sent as an empty message."""
    peer = transport.size - 1 - transport.rank
    if peer != transport.rank:
        buffer = torch.zeros(5)
        receive = transport.irecv(buffer, peer, 2100)
        transport.wait(transport.isend(torch.empty(0), peer, 2100), receive)
        assert receive.nbytes == 0
        assert buffer.count_nonzero() == 0
