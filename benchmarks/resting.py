"""Let ranks sleep while MPI waits instead of spinning, for many ranks on few cores.

A blocking MPI call polls, and yields its core between two polls with `mpi_yield_when_idle`. If
every rank has a core, that costs nothing. In the network lab eight ranks share two cores, and
waiting ranks take them from the rank that has data to move: Horovod's sums took four times as long.
Here `sched_yield` sleeps for a moment instead.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from aladdin_mpi.errors import UserError

REST_US = 50
"""Microseconds of sleep, short compared with a message's latency in the lab."""

_SOURCE = f"""
#include <time.h>
int sched_yield(void) {{
    struct timespec rest = {{0, {1000 * REST_US}}};
    nanosleep(&rest, 0);
    return 0;
}}
"""


def resting(folder: Path) -> dict[str, str]:
    """Return the environment of a rank that sleeps; build the library in ``folder``.

    Raises:
        UserError: no C compiler was found, or it failed.
    """
    library = folder / "resting.so"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise UserError(
            "Horovod in the network lab needs a C compiler: neither cc, gcc nor clang was found; "
            "on Debian and Ubuntu: apt-get install gcc"
        )
    command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    done = subprocess.run(command, input=_SOURCE, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise UserError(f"{' '.join(command)} failed:\n{done.stderr}")
    return {"LD_PRELOAD": str(library)}
