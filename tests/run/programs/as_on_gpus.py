"""Train as `aladdin_mpi.train` would on GPUs, as far as the size of buckets is concerned."""

from __future__ import annotations

import sys

from aladdin_mpi import train
from aladdin_mpi.run import handshake

if __name__ == "__main__":
    vars(handshake)["is_accelerator"] = lambda device: True
    sys.exit(train.main())
