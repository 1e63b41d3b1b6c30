"""Print the number of child processes before and after the rendezvous of the ranks."""

from __future__ import annotations

import os
from pathlib import Path

from aladdin_mpi.process import startup


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


startup.begin()
before = children()
from aladdin_mpi.transport.mpi.engine import MpiTransport  # noqa: E402

transport = MpiTransport(timeout=30)
after = children()
print(f"children {len(before)} {len(after)}", flush=True)
transport.close()
