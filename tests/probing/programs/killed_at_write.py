"""Write ``cluster.toml`` and be killed before it is complete.

Argument: 1 to overwrite the file, else 0.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from aladdin_mpi.probing.cluster_file import write


def kill(fd: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


os.fsync = kill
write(Path("cluster.toml"), "hosts = 2", overwrite=bool(int(sys.argv[1])))
