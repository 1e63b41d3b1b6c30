"""Train a model that FSDP divides among the ranks of islands of two; print figures as JSON.

Arguments: the algorithm, and JSON with ``how`` (names of variants) and settings of DataParallel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel, island_mesh

algorithm, given = sys.argv[1], json.loads(sys.argv[2])
how: set[str] = set(given.pop("how", ()))
place: dict[str, Any] = {"algorithm": algorithm, "servers": given.pop("servers", 1)}
island, size = given.pop("island", 2), given.pop("mesh", 2)


class Recomputed(nn.Sequential):
    """Layers whose activations are computed again during backward."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


torch.manual_seed(0)
norm = nn.BatchNorm1d(9) if "batch norm" in how else nn.LayerNorm(9)
layers: list[nn.Module] = [nn.Linear(5, 9), norm, nn.Tanh()]
body = (Recomputed if "recomputed" in how else nn.Sequential)(*layers)
model = nn.Sequential(body, nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))
if "frozen" in how:
    model[1].requires_grad_(False)
mesh = island_mesh(size, **place)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
precision = policy if "bfloat16" in how else MixedPrecisionPolicy()
if "divided by columns" in how:
    weight = model.get_parameter("1.weight")
    model[1].weight = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(1)]))
else:
    modules: list[nn.Module] = [model[0], model[1], model[3], model]
    if "only the root" in how:
        modules = [model]
    elif "only a layer" in how:
        modules = [model[1]]
    elif "replicated" in how:
        modules = []
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=precision)

inputs = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
labels = inputs[:, :3].argmax(1)


def evaluate(trained: nn.Module) -> dict[str, float]:
    outputs = trained(inputs).detach()
    accuracy = (outputs.argmax(1) == labels).float().mean()
    return {
        "test_loss": float(functional.cross_entropy(outputs, labels)),
        "test_accuracy": float(accuracy),
    }


optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
settings = {"epochs": 8, "batch_size": 4, "quiet": True, "timeout": 40, **given}
run = DataParallel(
    model, optimizer=optimizer, evaluate=evaluate, island=island, **place, **settings
)


def step(batch: Tensor, targets: Tensor) -> None:
    loss = functional.cross_entropy(model(batch), targets)
    loss.backward()
    if "clipped" in how:
        run.clip_grad_norm_(0.5)
    run.step(loss)


if "epochs" in how:
    for epoch in run.epochs(TensorDataset(inputs, labels)):
        for batch in epoch:
            step(*batch)
        if "batches" in how:
            run.evaluation_batches(TensorDataset(inputs, labels))
        with torch.no_grad():  # leaves gathered parameters, as backward does not free them
            correct = (model(inputs).argmax(1) == labels).sum() if not run.is_server else 0
            loss = functional.cross_entropy(model(inputs), labels) if not run.is_server else 0
        run.reduce(correct, "sum")
        run.print(f"epoch {epoch}: loss {loss:.5f}")
else:
    for number, batch in enumerate(run.batches(TensorDataset(inputs, labels))):
        if "left" in how and number == 3:
            break
        step(*batch)
        if "written" in how:
            model.get_parameter("3.bias").data.zero_()
if not run.is_server:
    figures = {name: f"{value:.6g}" for name, value in evaluate(model.eval()).items()}
    print(json.dumps({"rank": run.transport.rank, **figures}), flush=True)
if run.summary:
    names = "samples", "gradients_computed", "gradients_applied", "parameters", "model"
    print(json.dumps({name: run.summary[name] for name in (*names, "test_loss")}), flush=True)
if "destroyed" in how:
    torch.distributed.destroy_process_group()
