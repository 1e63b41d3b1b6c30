"""Whether this MPI lets the living go on: user-level fault mitigation (ULFM), MPI-5.0."""

from __future__ import annotations

import os

import mpi4py

VARIABLE = "OMPI_MCA_mpi_ft_enable"
"""Set for every rank by ``mpirun --with-ft ulfm``."""
SURVIVES = os.environ.get(VARIABLE, "0").lower() in ("1", "true", "yes")

if SURVIVES:
    # A death during MPI_Finalize may hang the others in it. The ranks take leave by themselves
    # instead (MpiTransport.close).
    mpi4py.rc.finalize = False
