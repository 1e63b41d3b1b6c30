"""Quantised sums and sums of low rank: conservation, equality of all ranks, and traffic."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, PendingSum
from aladdin_mpi.allreduce.low_rank import LowRank
from aladdin_mpi.allreduce.surviving import PlainSums
from aladdin_mpi.allreduce.with_residual import SumCodec, make_all_reduce, residual_of
from aladdin_mpi.codec.quantised import make_codec
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.flat.layout import Layout, cut
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualTransport
from tests.sums_lab import SHAPES, codec_of, conserves_values, layout_of, summands
from tests.virtual_lab import lab, run

CPU, META = torch.device("cpu"), torch.device("meta")
KINDS = ["int8", "int4", "int2", "powersgd"]
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.sample(4)
@kinds
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(2))
def test_applied_sums_and_residuals_equal_all_summands(kind: str, ranks: int, seed: int) -> None:
    norms = run(ranks, lambda t: conserves_values(t, kind, 12), lab(2, delay_us=300), seed)
    assert max(norms) > 1e-3  # otherwise nothing was left out
    assert max(norms) < {"int8": 0.1, "int4": 0.5, "int2": 3.0, "powersgd": 30.0}[kind]


def sums(transport: Transport, codec: LowRank, layout: Layout, flats: list[Tensor]) -> list[Tensor]:
    """Return the sums of one vector after another."""
    reducer = make_all_reduce("auto", transport, CPU, codec, layout.buckets)
    totals = []
    for flat in flats:
        values = flat.clone()
        pending = [reducer.start(b.of(values), b.index) for b in layout.buckets]
        totals.append(torch.cat([one.wait() for one in pending]))
    return totals


def of_rank(rank: int, seed: int, ranks: int) -> tuple[list[Tensor], Tensor]:
    """Return vectors of which each matrix has full rank, and their sum, which has ``rank``."""
    random = torch.Generator().manual_seed(seed)
    total, parts = [], [[] for _ in range(ranks)]  # type: list[Tensor], list[list[Tensor]]
    for shape in SHAPES:
        numel = int(torch.Size(shape).numel())
        rows = shape[0] if shape else 1
        factors = [torch.randn(n, rank, generator=random) for n in (rows, numel // rows)]
        whole = (factors[0] @ factors[1].t()).view(-1)
        own = [torch.randn(numel, generator=random) for _ in range(ranks - 1)]
        for part, values in zip(parts, [*own, whole - sum(own)], strict=True):
            part.append(values)
        total.append(whole)
    return [torch.cat(part) for part in parts], torch.cat(total)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("true_rank", [1, 2, 5])
def test_low_rank_sum_is_exact_up_to_its_rank(rank: int, true_rank: int) -> None:
    def main(transport: VirtualTransport) -> None:
        layout = layout_of()
        codec = codec_of("powersgd", layout, rank=rank)
        assert isinstance(codec, LowRank)
        parts, expected = of_rank(true_rank, 0, transport.size)
        (total,) = sums(transport, codec, layout, [parts[transport.rank]])
        is_close = torch.allclose(total, expected, rtol=1e-3, atol=1e-3)
        assert is_close == (true_rank <= rank)
        whole = torch.ones(layout.numel, dtype=torch.bool)
        for each in codec.matrices:
            whole[each.part] = False
        assert torch.allclose(total[whole], expected[whole], atol=1e-5)

    run(3, main)


def test_low_rank_sum_recovers_from_zeros() -> None:
    """With Q = M^T P instead of an orthogonal one, all later sums would be zero."""

    def main(transport: VirtualTransport) -> None:
        layout = layout_of()
        codec = codec_of("powersgd", layout)
        assert isinstance(codec, LowRank)
        parts, expected = of_rank(2, 1, transport.size)
        flats = [torch.zeros(layout.numel)] * 2 + [parts[transport.rank]]
        totals = sums(transport, codec, layout, flats)
        assert not totals[1].any()
        torch.testing.assert_close(totals[2], expected, rtol=1e-3, atol=1e-3)

    run(2, main)


def test_power_iteration_finds_largest_directions() -> None:
    """Of a constant matrix, the sum comes close to the best approximation of its rank."""
    matrix = torch.zeros(40, 30)
    matrix.diagonal().copy_(0.8 ** torch.arange(30.0))
    layout = layout_of()
    flat = torch.zeros(layout.numel)
    flat[7 : 7 + 1200] = matrix.view(-1)

    def main(transport: VirtualTransport) -> list[float]:
        codec = codec_of("powersgd", layout, rank=4)
        assert isinstance(codec, LowRank)
        errors = []
        for _ in range(8):
            codec.left = None
            (total,) = sums(transport, codec, layout, [flat])
            errors.append(float((total - flat).norm()))
        return errors

    (errors,) = run(1, main)
    best = float(matrix.diagonal()[4:].norm())
    assert errors[0] > 1.2 * best
    assert errors[-1] < 1.02 * best


def traffic(
    transport: VirtualTransport, kind: str, device: torch.device, numel: int = 400_000
) -> tuple[int, float]:
    layout = cut(numel, 0, 0.4, 64.0)
    codec: SumCodec = make_codec(kind, layout, device, transport.needs_memory)
    reducer: AllReduce = make_all_reduce("auto", transport, device, codec, layout.buckets)
    flat = torch.ones(numel, device=device)
    for _ in range(2):
        pending = []
        for bucket in layout.buckets:
            transport.sleep(0.01)
            pending.append(reducer.start(bucket.of(flat), bucket.index))
        for one in pending:
            one.wait()
    return transport.traffic.bytes_sent, transport.now()


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "share"), [("int8", 1 / 3.9), ("int4", 1 / 7), ("int2", 1 / 15)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_quantised_sum_sends_a_small_share_of_the_bytes_in_fp32(
    kind: str, share: float, ranks: int
) -> None:
    whole = sum(sent for sent, _ in run(ranks, lambda t: traffic(t, "fp32", CPU)))
    few = sum(sent for sent, _ in run(ranks, lambda t: traffic(t, kind, CPU)))
    assert 0 < few <= share * whole


@pytest.mark.parametrize("kind", ["int8", "int2"])
def test_quantised_sum_of_sizes_takes_same_time_and_bytes_as_of_values(kind: str) -> None:
    real = run(3, lambda t: traffic(t, kind, CPU))
    assert run(3, lambda t: traffic(t, kind, META)) == real


def test_low_rank_sum_sends_both_factors_and_whole_vectors() -> None:
    def main(device: torch.device, transport: VirtualTransport) -> int:
        layout = layout_of()
        codec = codec_of("powersgd", layout, device, transport.needs_memory)
        reducer = make_all_reduce("ring", transport, device, codec, layout.buckets)
        flat = torch.ones(layout.numel, device=device)
        for bucket in layout.buckets:
            reducer.start(bucket.of(flat), bucket.index).wait()
        return transport.traffic.bytes_sent

    factors = 2 * (40 + 30 + 16 + 75)
    whole = sum(
        int(torch.Size(shape).numel()) for shape in SHAPES if shape not in ((40, 30), (16, 3, 5, 5))
    )
    for device in (CPU, META):
        assert sum(run(2, partial(main, device))) == 2 * 4 * (factors + whole)


@pytest.mark.parametrize("kind", ["int8", "int2"])
def test_quantised_sum_overlaps_with_computing(kind: str) -> None:
    """Both rounds proceed while the ranks compute, even if no other sum is started."""

    def main(transport: VirtualTransport) -> tuple[float, float]:
        layout = cut(250_000, 0, 4.0, 64.0)
        codec = make_codec(kind, layout, CPU, transport.needs_memory)
        reducer = make_all_reduce("auto", transport, CPU, codec, layout.buckets)
        pending = reducer.start(torch.ones(250_000), 0)
        transport.sleep(1.0)
        pending.wait()
        return transport.traffic.waiting, transport.now()

    assert run(4, main) == [(0.0, 1.0)] * 4


@kinds
def test_restored_state_continues_bit_for_bit(kind: str) -> None:
    def main(transport: VirtualTransport) -> None:
        layout = layout_of()
        totals: dict[bool, list[Tensor]] = {True: [], False: []}
        for is_restored, mine in totals.items():
            codec: Any = codec_of(kind, layout)
            for turn in range(4):
                if is_restored and turn == 2:
                    state = codec.state_dict()
                    codec = codec_of(kind, layout)
                    codec.load_state_dict(state)
                random = torch.Generator().manual_seed(10 * turn + transport.rank)
                flat = torch.randn(layout.numel, generator=random)
                mine += sums(transport, codec, layout, [flat])
        assert all(map(torch.equal, totals[True], totals[False]))

    run(3, main)


class Interrupted(AllReduce):
    """An all-reduce of which a failure interrupts all sums but the first."""

    name = "interrupted"

    def __init__(self, inner: AllReduce) -> None:
        self._inner = inner

    def start(self, values: Tensor, key: int) -> PendingSum:
        pending = self._inner.start(values, key)

        def wait() -> Tensor:
            total = pending.wait()
            if key:
                raise PeerFailedError(1, "host")
            return total

        return PendingSum(wait)

    def describe(self) -> str:
        return "interrupted"


@kinds
def test_interrupted_sums_leave_the_state_unchanged(kind: str) -> None:
    """The models do not change either, so the next sums would add the residuals' changes twice."""

    def main(transport: VirtualTransport) -> None:
        layout = layout_of()
        codec = codec_of(kind, layout)
        residual = residual_of(codec)
        assert residual is not None
        reducer = make_all_reduce("auto", transport, CPU, codec, layout.buckets)
        for turn in range(2):
            is_interrupted = turn == 1
            before = deepcopy(codec.state_dict())
            all_reduce = Interrupted(reducer) if is_interrupted else reducer
            sums = PlainSums(all_reduce, transport.size, residual)
            flat = summands(transport, turn, layout.numel)
            for bucket in layout.buckets:
                sums.start(bucket.of(flat), bucket)
            with pytest.raises(PeerFailedError) if is_interrupted else nullcontext():
                sums.finish()
            after = codec.state_dict()
            for name, values in after.items():
                is_same = before[name] is not None and torch.equal(values, before[name])
                assert is_same == is_interrupted
            assert torch.equal(after["left"], residual.on(CPU)) != is_interrupted

    run(3, main)
