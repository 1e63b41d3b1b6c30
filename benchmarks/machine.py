"""What a benchmark ran on: stated at the head of its output and stored beside its results."""

from __future__ import annotations

from aladdin_mpi.comparison.folder import Machine, machine

__all__ = ["Machine", "describe_machine", "machine"]


def describe_machine(facts: Machine | None = None) -> str:
    """:func:`machine`, or the facts it gave before, as lines of text."""
    facts = machine() if facts is None else facts
    return "\n".join(f"{key:<10} {'-' if value is None else value}" for key, value in facts.items())


if __name__ == "__main__":
    print(describe_machine())
