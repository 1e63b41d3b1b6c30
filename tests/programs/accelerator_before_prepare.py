"""Use an accelerator before ``prepare`` and print the errors."""

from __future__ import annotations

from collections.abc import Callable

from aladdin_mpi import Accelerator

accelerator = Accelerator(epochs=1)
uses: tuple[Callable[[], object], ...] = (
    lambda: accelerator.save_state("folder"),
    lambda: accelerator.run,
    accelerator.prepare,
)
for use in uses:
    try:
        use()
    except Exception as error:
        print(type(error).__name__, error)
