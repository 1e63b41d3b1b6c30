"""Print host, local ranks, ``GREETING`` and ``OMP_NUM_THREADS`` of every rank as JSON."""

from __future__ import annotations

import json
import os
import socket

from mpi4py import MPI

world = MPI.COMM_WORLD
inside = world.Split_type(MPI.COMM_TYPE_SHARED).size
facts = [socket.gethostname(), inside, os.environ.get("GREETING"), os.environ["OMP_NUM_THREADS"]]
world.Barrier()
all_facts = world.gather(facts)
if world.rank == 0:
    print(json.dumps(all_facts))
