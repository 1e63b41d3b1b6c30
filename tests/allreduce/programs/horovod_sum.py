"""Sum a vector over two ranks with Horovod in the same process as mpi4py."""

from __future__ import annotations

# isort: off
from mpi4py import MPI  # before torch: some MPIs cannot be loaded after it
import torch
import horovod.torch as hvd
# isort: on

hvd.init()
assert (hvd.rank(), hvd.size()) == (MPI.COMM_WORLD.rank, 2)
total = hvd.allreduce(torch.arange(5.0) * (hvd.rank() + 1), op=hvd.Sum)
assert total.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0], total
print("summed", flush=True)
