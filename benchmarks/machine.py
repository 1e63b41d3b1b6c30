"""Facts about the machine of a benchmark, printed in its output and stored with its results."""

from __future__ import annotations

from aladdin_mpi.comparison.folder import Machine, machine

__all__ = ["Machine", "describe_machine", "machine"]


def describe_machine(facts: Machine | None = None) -> str:
    """Return the given facts, or those of :func:`machine`, as lines of text."""
    facts = machine() if facts is None else facts
    return "\n".join(f"{key:<10} {'-' if value is None else value}" for key, value in facts.items())


if __name__ == "__main__":
    print(describe_machine())
