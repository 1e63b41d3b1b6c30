"""What a benchmark ran on: stated at the head of its output and stored beside its results."""

from __future__ import annotations

from aladdin_mpi.comparison.folder import Machine, describe_machine, machine

__all__ = ["Machine", "describe_machine", "machine"]

if __name__ == "__main__":
    print(describe_machine())
