"""Lock a folder as a run does, and start what a data loader is: a fork that outlives it.

The argument: the folder.
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
