"""Train the example's GPT with AdamW; `benchmarks.gpt` simulates this program.

Arguments: the run folder, the seed, the epochs.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.data import DataLoader

from aladdin_mpi import DataParallel

EXAMPLE = Path(__file__).parents[2] / "examples" / "parallel" / "char_gpt.py"
LENGTH, BATCH, RATE = 64, 8, 5e-3


def example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("char_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(run_dir: str, seed: int, epochs: float) -> None:
    """Train, with a warm-up and half a cosine; the test loss is in the summary."""
    gpt = example()
    text = inspect.getsource(gpt.argparse) + inspect.getsource(inspect)
    letters, cut = "".join(sorted(set(text))), int(0.9 * len(text))
    train, test = gpt.Text(text[:cut], letters, LENGTH), gpt.Text(text[cut:], letters, LENGTH)
    torch.manual_seed(seed)
    model = gpt.GPT(len(letters), LENGTH)
    run = DataParallel(
        model,
        optimizer=torch.optim.AdamW(gpt.groups(model), lr=RATE, betas=(0.9, 0.95)),
        lr_schedule="cosine",
        warmup_epochs=0.5,
        clip=1.0,
        epochs=epochs,
        seed=seed,
        run_dir=run_dir,
        quiet=True,
        evaluate=lambda module: {"test_loss": gpt.validate(module, test)},
    )
    for batch in run.batches(DataLoader(train, BATCH, shuffle=True, collate_fn=gpt.collate)):
        loss = gpt.loss_of(model, batch)
        loss.backward()
        run.step(loss)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
