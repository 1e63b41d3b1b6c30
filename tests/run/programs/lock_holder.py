"""Lock a folder as a run does, and fork a process that outlives this one, as a data loader does.

Argument: the folder.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from aladdin_mpi.run import run_folder

lock = run_folder.take(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getppid(), os.getpid(), flush=True)
    time.sleep(100)
    os._exit(0)
time.sleep(100)
