"""Start a rank with a limit of 2 seconds for MPI's startup, and stop rank 2.

Arguments: ``before`` or ``after`` MPI has started, and the signal that rank 2 sends to itself.
"""

from __future__ import annotations

import os
import signal
import sys

from aladdin_mpi.process import startup

startup.LEAST = startup.MEETING_LEAST = 2.0
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
moment, name = sys.argv[1:]

if moment == "before":
    from aladdin_mpi import train

    if rank == 2:
        startup.begin(2)
        os.kill(os.getpid(), signal.Signals[name])
    sys.exit(train.main(["--timeout", "2", "--quiet"]))

startup.begin()
startup.expect(startup.MPI_STARTS, 20)
from aladdin_mpi.transport.mpi.engine import MpiTransport  # noqa: E402

if rank == 2:
    os.kill(os.getpid(), signal.Signals[name])
MpiTransport(timeout=2)
