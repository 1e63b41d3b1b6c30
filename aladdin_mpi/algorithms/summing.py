"""Workers that add up vectors by a library's all-reduce."""

from __future__ import annotations

from aladdin_mpi.allreduce.base import AllReduce
from aladdin_mpi.roles.role import TrainingWorker


class SummingWorker(TrainingWorker):
    """A worker that holds an all-reduce, says which, and ends it."""

    all_reduce: AllReduce

    def close(self) -> None:
        """End the library's part."""
        super().close()
        self.all_reduce.close()

    def describe(self) -> str:
        """Which library sums."""
        return f"all-reduce: {self.all_reduce.describe()}"
