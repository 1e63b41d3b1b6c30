"""The MPI library: its configuration before MPI_Init, and its capabilities."""

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
    # A failure during MPI_Finalize may hang the other ranks in it. The ranks synchronise their end
    # themselves instead (MpiTransport.close).
    mpi4py.rc.finalize = False


if "HOME" not in os.environ:  # without it, MPI_Init of Open MPI fails
    os.environ["HOME"] = os.path.expanduser("~").replace("~", "/")  # "~": an unknown user

TCP_FLAGS = "OMPI_MCA_btl_tcp_flags"
IN_PIECES = "send,inplace,need-ack,need-csum,hetero-rdma"
"""Open MPI's default without "put", which writes all of a long message but its start into a
connection at once. Other messages between the two ranks then queue after it, including the
clear-to-send for the opposite direction, so that each pair of ranks used a link in one direction at
a time. In pieces, eight ranks on four hosts that all send to each other by TCP use 0.9 of their
links instead of 0.7 (`benchmarks.calibration`), at the price of a copy at the receiver."""

os.environ.setdefault(TCP_FLAGS, IN_PIECES)

TRANSPORTS = "OMPI_MCA_btl"
WITHOUT_NETWORK = "^tcp,ofi"
"""If all ranks are on one host, messages go through shared memory, and no listening sockets are
needed: TCP listens on all interfaces, whatever `btl_tcp_if_include` says. OFI takes a second to
find that it is not needed."""
USERS_FILE = Path(os.path.expanduser("~"), ".openmpi", "mca-params.conf")


def is_one_host() -> bool:
    """Return whether Open MPI's launcher has started all ranks on this host."""
    size = os.environ.get("OMPI_COMM_WORLD_SIZE")
    return size is not None and os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size


def _is_chosen() -> bool:
    """Return whether the user has selected transports."""
    if TRANSPORTS in os.environ:
        return True
    try:
        return re.search(r"^\s*btl\s*=", USERS_FILE.read_text(), re.MULTILINE) is not None
    except (OSError, ValueError):
        return False


SETTLE_SECONDS = 0.5


def settle() -> None:
    """Wait after MPI_Init until it has ended on every host, before the first message.

    Slurm may start a host's ranks a moment before another's. If a message arrives during MPI_Init,
    Open MPI crashes in `mca_pml_ob1_recv_frag_callback_match` (open-mpi/ompi, issue 12495; seen
    once in some hundred starts by srun, Slurm 22.05).
    """
    hosts = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    parts = int(os.environ.get("SLURM_HET_SIZE", "1"))
    is_by_srun = "PMIX_RANK" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ
    if is_by_srun and "SLURM_PROCID" in os.environ and max(hosts, parts) > 1:
        time.sleep(SETTLE_SECONDS)


if is_one_host() and not _is_chosen():
    os.environ[TRANSPORTS] = WITHOUT_NETWORK
