"""Bind this process to one core, and check that a previously started thread is bound too."""

from __future__ import annotations

import os
import threading

import torch

from aladdin_mpi.run.placement import bind

cores: list[set[int]] = []
"""The thread's cores, after this process was bound."""
event = threading.Event()


def wait() -> None:
    event.wait(10)
    cores.append(os.sched_getaffinity(0))


thread = threading.Thread(target=wait)
thread.start()
torch.set_num_threads(8)
first = min(os.sched_getaffinity(0))
bind((first,))
event.set()
thread.join()
assert [os.sched_getaffinity(0)] == cores == [{first}], cores
assert torch.get_num_threads() == 1
print("bound")
