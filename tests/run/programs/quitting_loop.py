"""Train with a custom loop that calls ``sys.exit()``.

Arguments: the folder of the run; the last sample that can be read; ``loop`` for an exit in the
loop.
"""

from __future__ import annotations

import sys

import torch

from aladdin_mpi import DataParallel
from tests.run.programs.quitting import Data, plain_model

folder, last, place = sys.argv[1:]
model = plain_model()
run = DataParallel(model, algorithm="asp", samples=128, batch_size=4, run_dir=folder)
for images, labels in run.batches(Data(int(last))):
    if place == "loop":
        sys.exit()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    run.step(loss)
sys.exit(0)
