"""What Open MPI is told before it starts, unless the user has told it otherwise.

Import this before ``mpi4py.MPI``.
"""

from __future__ import annotations

import os

TCP_FLAGS = "OMPI_MCA_btl_tcp_flags"
IN_PIECES = "send,inplace,need-ack,need-csum,hetero-rdma"
"""Open MPI's own choice but for "put", with which all of a long message but its beginning goes
into a connection at once. What the same two ranks say meanwhile waits behind it: also the word
that the other one may send its own message, so that each pair of ranks used a link in one
direction at a time. In pieces, eight ranks on four hosts that all send to each other by TCP get
0.9 of their links, and not 0.7 (`benchmarks.calibration`). The price is a copy at the receiver."""

os.environ.setdefault(TCP_FLAGS, IN_PIECES)
