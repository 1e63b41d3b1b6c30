"""PowerSGD: sums of low rank (Vogels, Karimireddy, Jaggi; NeurIPS 2019, Algorithms 1 and 2).

A tensor is a matrix of (first dimension) x (rest). With M_i worker i's matrix plus its residual,
and a matrix Q of r orthonormal columns that is the same on all workers::

    P    <- orthogonalise(sum_i M_i Q)         # first all-reduce
    Q_i  <- M_i^T P
    e_i  <- M_i - P Q_i^T                      # the residual
    sum  <- P (sum_i Q_i)^T                    # second all-reduce
    Q    <- orthogonalise(sum_i Q_i)           # for the next step: a step of power iteration

The sum is exact if its rank is at most r, unless Q is orthogonal to a direction of it. The applied
sums plus all ranks' residuals equal the sum of all matrices. Every rank computes P and Q by
the same code from the same input. Unlike in the paper, Q is orthogonalised as well: otherwise a
matrix of lower rank, such as zero, would remove directions from Q for good. Tensors that two
factors would not make smaller, such as vectors, are summed in full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, PendingSum
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.codec.residual import Residual
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.vectors import copy, sizes


class _Matrix(NamedTuple):
    """A tensor of low rank: its parts of the flat vector and of the flat ``q``, and its shape."""

    part: slice
    warm: slice
    rows: int
    columns: int


class LowRank(Residual):
    """A rank's state: the residual, and the matrices Q for the next step, the same on all ranks.

    Args:
        plain: the codec of factors, in fp32.
        shapes: shapes of the parameters in flat order.
        rank: largest rank of the sums, at least 1.
    """

    def __init__(self, plain: DenseWire, shapes: Sequence[tuple[int, ...]], rank: int) -> None:
        self.plain = plain
        self.rank = rank
        self.matrices: list[_Matrix] = []
        stop = warm = 0
        for shape in shapes:
            start, stop = stop, stop + prod(shape)
            rows, columns = shape[0] if shape else 1, prod(shape[1:])
            if rank * (rows + columns) < stop - start:
                own = slice(warm, warm := warm + rank * columns)
                self.matrices.append(_Matrix(slice(start, stop), own, rows, columns))
        super().__init__(stop, plain.device)
        self.q = self._first_q(warm)
        self._kept_q: Tensor | None = None

    def _first_q(self, numel: int) -> Tensor:
        """Return random orthonormal columns, the same on every rank."""
        device = self.plain.device
        if device.type == "meta":
            return sizes(numel, torch.float32)
        q = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        for each in self.matrices:
            own = q[each.warm].view(each.columns, self.rank)
            own.copy_(orthogonalised(own))
        return q.to(device)

    def keep(self, bucket: Bucket, values: Tensor) -> None:
        """Keep the residual of ``bucket``, and all matrices Q."""
        super().keep(bucket, values)
        if self._kept_q is None:
            self._kept_q = self.q.clone()

    def settle(self) -> None:
        """Drop all copies."""
        super().settle()
        self._kept_q = None

    def state_dict(self) -> dict[str, Any]:
        """Return ``left`` and ``q``; the mean of all ranks' ``q``, which are equal, is the same."""
        return {**super().state_dict(), "q": self.q if self._kept_q is None else self._kept_q}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``left`` and ``q``."""
        super().load_state_dict(state)
        self.q = state["q"].to(self.plain.device, copy=True)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return orthonormal columns that span those of ``matrix``, even if these are dependent."""
    return torch.linalg.qr(matrix).Q


class LowRankAllReduce(AllReduce):
    """Sum of low rank by two sums of factors, with the residual in ``state``.

    The first sum overlaps with computing; the second begins when a rank waits for the result.

    Args:
        inner: sums the factors.
        buckets: buckets whose indices are the keys; each contains whole tensors.
    """

    name = "low-rank"

    def __init__(self, inner: AllReduce, state: LowRank, buckets: Sequence[Bucket]) -> None:
        self._inner = inner
        self._state = state
        self._buckets = buckets
        self._plans: dict[int, _Plan] = {}
        self._started: deque[_LowRankSum] = deque()

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start the sum of the factors P and of what is not of low rank."""
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan(self._state, self._buckets[key], values)
        pending = _LowRankSum(self._inner, self._state, plan, values, key)
        self._started.append(pending)
        return PendingSum(partial(self._finish, pending))

    def _finish(self, pending: _LowRankSum) -> Tensor:
        """Start the second sums of all that were started, in the same order on all ranks."""
        while self._started:
            self._started.popleft().sum_q()
        return pending.result()

    def describe(self) -> str:
        """Return the rank, and the description of the sum of factors."""
        return f"rank {self._state.rank} (PowerSGD), factors by {self._inner.describe()}"

    def abandon(self, failed_rank: int) -> None:
        """End waits for the sums of factors."""
        self._inner.abandon(failed_rank)

    def close(self) -> None:
        """Close the sum of factors."""
        self._inner.close()


class _Factors(NamedTuple):
    """A matrix of a bucket: its part of the bucket, and those of its factors in the messages."""

    matrix: _Matrix
    part: slice
    p: slice
    q: slice


class _Plan:
    """The messages about a bucket: factors P, then ``whole`` parts of the bucket; and factors Q."""

    def __init__(self, state: LowRank, bucket: Bucket, like: Tensor) -> None:
        self.bucket = bucket
        self.factors: list[_Factors] = []
        self.whole: list[slice] = []
        end = p = q = 0
        for each in state.matrices:
            start, stop = each.part.start - bucket.start, each.part.stop - bucket.start
            if start < 0 or start >= bucket.numel:
                continue
            assert stop <= bucket.numel, "buckets contain whole tensors"
            self.whole.append(slice(end, start))
            end = stop
            of_p = slice(p, p := p + state.rank * each.rows)
            of_q = slice(q, q := q + state.rank * each.columns)
            self.factors.append(_Factors(each, slice(start, stop), of_p, of_q))
        self.whole.append(slice(end, bucket.numel))
        numel = p + sum(part.stop - part.start for part in self.whole)
        self.rest = slice(p, numel)
        self.first, self.second = (
            sizes(n, torch.float32) if like.is_meta else torch.zeros(n, device=like.device)
            for n in (numel, q)
        )


class _LowRankSum:
    """One sum in progress."""

    def __init__(
        self, inner: AllReduce, state: LowRank, plan: _Plan, values: Tensor, key: int
    ) -> None:
        self.inner, self.state, self.plan = inner, state, plan
        self.values = values
        self.key = key
        self.bases: list[Tensor] = []
        self.q: PendingSum | None = None
        if not values.is_meta:
            for factors in plan.factors:
                matrix = self._matrix(factors)
                matrix.add_(values[factors.part].view_as(matrix))
                torch.mm(matrix, self._warm(factors), out=self._cut(plan.first, factors.p))
            plan.first[plan.rest] = torch.cat([values[part] for part in plan.whole])
        self.p = inner.start(plan.first, 2 * key)

    def _matrix(self, factors: _Factors) -> Tensor:
        """Return the matrix's residual, to which the summand is added."""
        left, matrix = self.state.on(self.values.device), factors.matrix
        return left[matrix.part].view(matrix.rows, matrix.columns)

    def _warm(self, factors: _Factors) -> Tensor:
        return self._cut(self.state.q, factors.matrix.warm)

    def _cut(self, message: Tensor, part: slice) -> Tensor:
        """Return a factor as a matrix of r columns."""
        return message[part].view(-1, self.state.rank)

    def sum_q(self) -> None:
        """Wait for the factors P, start the sum of the factors Q, and compute the residual."""
        plan, total = self.plan, self.p.wait()
        if not self.values.is_meta:
            for factors in plan.factors:
                matrix = self._matrix(factors)
                basis = orthogonalised(self._cut(total, factors.p))
                q = torch.mm(matrix.t(), basis, out=self._cut(plan.second, factors.q))
                matrix.addmm_(basis, q.t(), alpha=-1.0)
                self.bases.append(basis)
            rest = total[plan.rest].split([part.stop - part.start for part in plan.whole])
            for part, sums in zip(plan.whole, rest, strict=True):
                self.values[part] = sums
        if plan.factors:
            self.q = self.inner.start(plan.second, 2 * self.key + 1)

    def result(self) -> Tensor:
        """Wait for the factors Q; return the sum, in the memory of the summand."""
        if self.q is None:
            return self.values
        total = self.q.wait()
        for factors, basis in zip(self.plan.factors, self.bases, strict=False):
            q = self._cut(total, factors.q)
            target = self.values[factors.part]
            target.copy_(torch.mm(basis, q.t()).view(-1))
            copy(self._warm(factors), orthogonalised(q))
        return self.values
