"""Multi-step communication (Lee, Agrawal, Balaprakash, Choudhary and Liao, MLHPC 2018).

Synchronous SGD without servers, after the authors' code (NU-CUCIS/pcnn). Ranks share the
work of summing and updating, and the second half of the communication overlaps the next
forward pass. After each step all ranks have the same model, that of one process with the
batches of all.

Weights are sent in full precision whatever the wire's dtype, so that replicas stay equal.
Unlike in the authors' code, batch norm's parameters are synchronised like all others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from aladdin_mpi.algorithms.multistep_hooks import LayerHooks, choose, cut_at_layers, describe
from aladdin_mpi.algorithms.multistep_layers import (
    DenseBias,
    DenseWeight,
    GradientPiece,
    LayerContext,
    LayerPiece,
)
from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.allreduce.compressed import InOrder
from aladdin_mpi.codec.base import DenseWire, GradientCodec
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.replica import DenseLayer, PhantomReplica, Replica
from aladdin_mpi.flat.state import MergedState, saved
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.options.algorithms import MULTISTEP, MultistepOptions, own, whole_gradient_options
from aladdin_mpi.options.general import GeneralOptions
from aladdin_mpi.process import console
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker

FITS, UNFIT, UNKNOWN = 1, 0, 2
"""A rank's verdict on a dense layer after the first step."""


class MultistepWorker(TrainingWorker):
    """Each rank sums and updates its 1/n of every piece of the model.

    Args:
        optimizer: supplies the settings; this rank's momentum covers only its own parts.
        options: the run's options. Dense layers that exchange activations and errors have
            their own buckets.
    """

    SAVED = TrainingWorker.SAVED | saved("exchanging")

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        options: GeneralOptions,
    ) -> None:
        self.options = options
        x, transport = worker.parameters, worker.transport
        weights = DenseWire(x.dtype, x.device, moves_bytes=transport.needs_memory)
        self.order = InOrder(transport)
        context = LayerContext(transport, self.order, x, wire.plain, weights, worker)
        exchanged = _exchanged(worker.model, worker.count, options)
        self.pieces = _pieces(context, worker.layout, exchanged, options.step_size)
        self.dense = [piece for piece in self.pieces if isinstance(piece, DenseWeight)]
        # Momentum: 1/n of it on each rank, one part of the vector for each piece.
        edges = [0]
        for piece in self.pieces:
            edges.append(edges[-1] + piece.numel)
        self.state = [slice(edges[i], edges[i + 1]) for i in range(len(self.pieces))]
        assert isinstance(optimizer, MomentumSGD)
        super().__init__(worker, _like(optimizer, x.new_zeros(edges[-1])))
        for layer in exchanged[::-1]:
            self.log(describe(layer, self.n, options.step_size, wire.plain.dtype.itemsize))
        self.g = worker.replica.new_vector()
        self.gathering = 0
        self.waiting_for_whole: list[Callable[[], None]] = []
        self.hooks: LayerHooks | None = None
        if isinstance(worker.model, Replica) and worker.model.module is not None:
            module = worker.model.module
            if worker.model.separate:
                raise UserError(
                    "model: multistep requires trainable parameters of one dtype, because it "
                    "updates layers during the forward pass. Use model.to(dtype), or another "
                    "algorithm, such as ar-sgd."
                )
            watch = worker.step.watch
            deliver = worker.model.gradients.deliver if watch is None else watch.deliver
            self.hooks = LayerHooks(
                module, self.pieces, self.finish, self.send_activations, deliver
            )

    def log(self, text: str) -> None:
        """Print, once for all ranks, which layers exchange activations and errors."""
        if self.index == 0 and not self.options.quiet:
            console.say(f"aladdin_mpi: multistep: {text}")

    def places(self, workers: int, worker: int) -> torch.Tensor:
        """Return the positions in the flat vector that a worker updates, in order of its pieces."""
        replica, options = self.worker.model, self.options
        exchanged = _exchanged(replica, workers, options)
        weights = {layer.weight.start: layer for layer in exchanged}
        biases = {layer.bias.start for layer in exchanged if layer.bias is not None}
        parts = []
        for bucket in multistep_layout(replica, workers, options).buckets:
            places = torch.arange(bucket.start, bucket.stop)
            if bucket.start in weights:
                inputs = weights[bucket.start].inputs
                places = places.view(-1, inputs)[:, _share(inputs, workers, worker)].reshape(-1)
            elif bucket.start not in biases:
                places = places[_share(bucket.numel, workers, worker)]
            parts.append(places)
        return torch.cat(parts)

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        with nullcontext() if self.hooks is None else self.hooks.installed():
            for _ in self.worker.batches():
                self.compute()
                self.update()
            self.finish_all()

    # -- backward, from the top layer down: all-to-all -------------------------------
    def compute(self) -> None:
        """Compute the gradient, and send each piece as soon as it is complete."""
        lease, n = self.worker.lease, self.worker.count
        for piece in self.dense:
            piece.begin(-(-lease.whole // n), lease.size)
        with nullcontext() if self.hooks is None else self.hooks.step(lease.size > 0):
            self.worker.gradient(self.g, self.send, before_forward=self.forward)
        if self.worker.current.norm is not None and any(piece.by_errors for piece in self.dense):
            # Possible in the first step after a resumption, or of a worker that had no samples.
            raise UserError(
                "training loop: run.clip_grad_norm_() requires gradients, but this run exchanges "
                "activations since its first step. Start a new run that clips in every step."
            )
        if any(piece.exchanging is None for piece in self.dense):
            self.decide()

    def send(self, bucket: Bucket) -> None:
        """Send the gradients of a piece."""
        self.finish_all()  # of layers that have taken no part in the forward pass
        self.send_activations(at_last=True)
        self.pieces[bucket.index].send(self.g, self.worker.share, self.worker.current.loss_scale)

    # -- after it, from the bottom layer up: sum, update, all-gather -----------------
    def update(self) -> None:
        """Update this rank's part of each piece, and send it to all ranks."""
        with self.worker.transport.atomic():
            self.gathering = len(self.pieces)
        for piece, state in zip(reversed(self.pieces), reversed(self.state), strict=True):
            g = piece.summed()
            w = piece.own()
            self.optimizer.descend(state, g, w, self.worker.lr)
            piece.gather(w)

    # -- the next forward pass: each layer waits for its own -------------------------
    def forward(self, bucket: Bucket) -> None:
        """Wait for a piece when the simulated forward pass reaches it."""
        piece = self.pieces[bucket.index]
        self.finish(piece)
        if isinstance(piece, DenseWeight) and self.x.is_meta:
            piece.send_activations()

    def finish(self, piece: LayerPiece) -> None:
        """Wait for all parts of a piece, if they are in flight."""
        if not piece.gathering:
            return
        piece.finish()
        if piece.gathering:  # the group is revoked, which the next step reports
            return
        self.gathering -= 1
        if not self.gathering:
            with self.worker.transport.atomic():
                for action in self.waiting_for_whole:
                    action()
                self.waiting_for_whole.clear()

    def finish_all(self) -> None:
        """Wait for everything in flight."""
        if self.gathering:
            for piece in reversed(self.pieces):
                self.finish(piece)

    def when_whole(self, action: Callable[[], None]) -> None:
        """Call ``action`` once every layer has its new parameters, possibly at once."""
        if self.gathering:
            self.waiting_for_whole.append(action)
        else:
            action()

    # -- dense layers -----------------------------------------------------------------
    def send_activations(self, at_last: bool = False) -> None:
        """Send complete activations, from the bottom layer up; ``at_last``: all of them."""
        for piece in reversed(self.dense):
            if piece.by_errors and not (at_last or piece.capture.is_complete):
                return
            piece.send_activations()

    def decide(self) -> None:
        """Agree, after the first step, on which dense layers can exchange activations."""
        transport = self.worker.transport
        mine = torch.tensor([self._verdict(piece) for piece in self.dense], dtype=torch.uint8)
        gathered = torch.empty(len(mine) * transport.size, dtype=torch.uint8)
        # Through the queue, as all collectives: others may be waiting in it for their turn.
        order = self.order
        order.wait(order.put(lambda: transport.iallgather(mine, gathered), None))
        for piece, verdicts in zip(self.dense, gathered.view(transport.size, -1).t(), strict=True):
            piece.exchanging = UNFIT not in verdicts.tolist()
            if not piece.exchanging:
                reason = "its input is not one 2-D tensor with a row for each sample"
                if not self.worker.clipping.tells_at_once:
                    reason = "the training loop clips them"
                self.log(f"{piece.layer.name or 'the model'} exchanges gradients: {reason}")

    def _verdict(self, piece: DenseWeight) -> int:
        if not self.worker.lease.size:
            return UNKNOWN
        fits = piece.capture.is_complete and self.worker.clipping.tells_at_once
        return FITS if fits else UNFIT

    # -- checkpoints --------------------------------------------------------------------
    @property
    def exchanging(self) -> list[bool | None]:
        """For each dense layer, ``exchanging`` of :class:`DenseWeight`."""
        return [piece.exchanging for piece in self.dense]

    @exchanging.setter
    def exchanging(self, values: list[bool | None]) -> None:
        for piece, value in zip(self.dense, values, strict=True):
            piece.exchanging = value

    def merge_worker(
        self,
        merged: dict[str, Any] | None,
        new: dict[str, Any],
        count: int,
        worker: int,
        workers: int,
    ) -> dict[str, Any]:
        """Merge a worker's state; the merged momentum covers the whole vector."""
        velocity = new["optimizer"]["velocity"]
        if velocity is not None:
            known = None if merged is None else merged["optimizer"]["velocity"]
            whole = velocity.new_zeros(self.layout.numel) if known is None else known
            if not whole.is_meta:
                whole[self.places(workers, worker)] = velocity
            # Merging averages it with itself, which changes nothing.
            new["optimizer"]["velocity"] = whole if known is None else whole.clone()
        return super().merge_worker(merged, new, count, worker, workers)

    def resize(self, merged: MergedState) -> None:
        """Restore this rank's part of the momentum; the exchange of each layer is decided again."""
        velocity = merged.worker["optimizer"]["velocity"]
        if velocity is not None:
            places = self.places(self.n, self.index)
            # Meta tensors have no values, so only the length matters.
            velocity = velocity[: len(places)] if velocity.is_meta else velocity[places]
        merged.worker["optimizer"] = {"velocity": velocity}
        super().resize(merged)


def _share(numel: int, workers: int, worker: int) -> slice:
    part = -(-numel // workers)
    return slice(min(part * worker, numel), min(part * (worker + 1), numel))


def _pieces(
    context: LayerContext, layout: Layout, exchanged: list[DenseLayer], batch: int
) -> list[LayerPiece]:
    """Return one piece for each bucket."""
    at = {bucket.start: bucket for bucket in layout.buckets}
    pieces: dict[int, LayerPiece] = {}
    for layer in exchanged:
        weight = DenseWeight(context, at[layer.weight.start], layer, batch)
        pieces[weight.bucket.index] = weight
        if layer.bias is not None:
            bias = DenseBias(context, at[layer.bias.start], weight)
            pieces[bias.bucket.index] = bias
    return [pieces.get(b.index) or GradientPiece(context, b) for b in layout.buckets]


def _like(optimizer: MomentumSGD, parts: torch.Tensor) -> MomentumSGD:
    """Return an optimizer with the same settings for other parameters."""
    return MomentumSGD(
        parts, optimizer.momentum, optimizer.weight_decay, optimizer.nesterov, optimizer.clip
    )


def multistep_layout(
    replica: Replica | PhantomReplica, workers: int, options: GeneralOptions
) -> Layout:
    """Return a layout whose buckets follow the layers."""
    return cut_at_layers(
        replica.layers, _exchanged(replica, workers, options), replica.numel, options.bucket_mb
    )


def _exchanged(
    replica: Replica | PhantomReplica, workers: int, options: GeneralOptions
) -> list[DenseLayer]:
    exchange = own(options, MultistepOptions).exchange
    if whole_gradient_options(options):
        exchange = "gradients"
    return choose(replica.dense, exchange, workers, options.step_size)


register(
    MULTISTEP,
    worker=MultistepWorker,
    layout=multistep_layout,
    updates_parts=True,
)
