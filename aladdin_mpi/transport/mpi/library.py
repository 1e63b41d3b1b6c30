"""The MPI library: how it is set up before it begins, and what it can do."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import mpi4py

VARIABLE = "OMPI_MCA_mpi_ft_enable"
"""Set for every rank by ``mpirun --with-ft ulfm``."""
SURVIVES = os.environ.get(VARIABLE, "0").lower() in ("1", "true", "yes")

if SURVIVES:
    # A death during MPI_Finalize may hang the others in it. The ranks take leave by themselves
    # instead (MpiTransport.close).
    mpi4py.rc.finalize = False


TCP_FLAGS = "OMPI_MCA_btl_tcp_flags"
IN_PIECES = "send,inplace,need-ack,need-csum,hetero-rdma"
"""Open MPI's own choice but for "put", with which all of a long message but its beginning goes
into a connection at once. What the same two ranks say meanwhile waits behind it: also the word
that the other one may send its own message, so that each pair of ranks used a link in one
direction at a time. In pieces, eight ranks on four hosts that all send to each other by TCP get
0.9 of their links, and not 0.7 (`benchmarks.calibration`). The price is a copy at the receiver."""

os.environ.setdefault(TCP_FLAGS, IN_PIECES)

TRANSPORTS = "OMPI_MCA_btl"
WITHOUT_NETWORK = "^tcp,ofi"
"""Where all ranks are on one host, messages go through its memory, and nobody has to listen: TCP
does so on all interfaces, whatever `btl_tcp_if_include` names. The other takes a second to find
that there is nothing for it."""
USERS_FILE = Path(os.path.expanduser("~"), ".openmpi", "mca-params.conf")


def is_one_host() -> bool:
    """Whether Open MPI's launcher has started all ranks on this host."""
    size = os.environ.get("OMPI_COMM_WORLD_SIZE")
    return size is not None and os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size


def _is_chosen() -> bool:
    """Whether the user has chosen among the transports."""
    if TRANSPORTS in os.environ:
        return True
    try:
        return re.search(r"^\s*btl\s*=", USERS_FILE.read_text(), re.MULTILINE) is not None
    except (OSError, ValueError):
        return False


SETTLE_SECONDS = 0.5


def settle() -> None:
    """After MPI_Init, before the first message: let it end on every host.

    Slurm may let a host's ranks through a moment before another's. Open MPI cannot take a message
    as long as MPI_Init waits: the rank dies in `mca_pml_ob1_recv_frag_callback_match`
    (open-mpi/ompi, issue 12495; seen once in some hundred starts by srun, Slurm 22.05).
    """
    hosts = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    parts = int(os.environ.get("SLURM_HET_SIZE", "1"))
    is_by_srun = "PMIX_RANK" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ
    if is_by_srun and "SLURM_PROCID" in os.environ and max(hosts, parts) > 1:
        time.sleep(SETTLE_SECONDS)


if is_one_host() and not _is_chosen():
    os.environ[TRANSPORTS] = WITHOUT_NETWORK
