"""Train a character-level GPT whose parameters are divided among the ranks of an island (FSDP2).

mpirun -np 4 python sharded_gpt.py      # two islands of two
mpirun -np 4 python sharded_gpt.py      # again: resumes, or ends at once if the run is complete

16 nodes with 4 GPUs: sbatch --nodes=16 --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=8
--time=04:00:00 --signal=B:USR2@120 --requeue --wrap="srun python sharded_gpt.py --island 4"
"""

from __future__ import annotations

import argparse
import inspect

import torch
from char_gpt import GPT, Text, collate, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import aladdin_mpi


class Recomputed(nn.Module):
    """A block whose activations are computed again during backward, instead of being kept."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to (N, T, width)."""
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def divide(model: GPT, mesh: DeviceMesh) -> None:
    """Divide each block, and the rest of the model, among the ranks of the mesh."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.blocks = nn.Sequential(*map(Recomputed, model.blocks))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def main() -> None:
    """Train, and measure the model after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", default="ar-sgd")
    parser.add_argument("--island", type=int, default=2, help="ranks that divide a model")
    parser.add_argument("--servers", type=int, default=0, help="a multiple of --island, or 0")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = vars(parser.parse_args())
    epochs = arguments.pop("epochs")
    arguments["servers"] = arguments["servers"] or arguments["island"]

    text = inspect.getsource(argparse) + inspect.getsource(inspect)
    letters, cut = "".join(sorted(set(text))), int(0.9 * len(text))
    train_data, test_data = Text(text[:cut], letters, 64), Text(text[cut:], letters, 64)
    torch.manual_seed(0)
    model = GPT(len(letters), 64)
    mesh = aladdin_mpi.island_mesh(**arguments)
    divide(model, mesh)

    def evaluate(trained: nn.Module) -> dict[str, float]:
        batches = DataLoader(test_data, 64, collate_fn=collate)
        losses = [
            loss_of(trained, {name: each.to(mesh.device_type) for name, each in batch.items()})
            for batch in batches
        ]
        return {"test_loss": float(torch.stack(losses).mean())}

    run = aladdin_mpi.DataParallel(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)),
        evaluate=evaluate,
        epochs=epochs,
        clip=1.0,
        run_dir="sharded-gpt",
        resume="auto",
        **arguments,
    )
    for batch in run.batches(DataLoader(train_data, 8, shuffle=True, collate_fn=collate)):
        loss = loss_of(model, batch)
        loss.backward()
        run.step(loss)


if __name__ == "__main__":
    main()
