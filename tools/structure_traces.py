"""Trace a short training run, and print the files of the package that it enters as JSON.

``tools/structure.py`` calls this script as ``structure_traces.py TRACE``. It simulates a run in
virtual time. A file counts if one of its functions is entered, except while a module is imported.
The files of the engine (the folder of the class of ``run.transport``) never count. There are three
traces. This file is also the training script of the first and the last.

gradient
    `aladdin` with two workers, a server and ``pi`` 1, in the middle of a segment. A file counts if
    a function of it is called, directly or through others, from ``loss.backward()`` or
    ``run.step()`` in the training loop, or from ``run()`` of the algorithm's worker or server.
    This leaves out message handlers (sample budget, metrics). Calls below a function named
    ``batches`` do not count: they request samples and load them. Computing takes real time here,
    so that hooks send each bucket during backward, as they do over MPI.
option
    ``--aladdin-pi`` in the built-in training, from the command line to the constructors of the
    algorithm's worker and server. A file counts if a function of it takes or returns the value or
    the name of the option: by itself, in a collection, or as an attribute of an object, as in the
    algorithm's options. Objects that hold such objects, such as the run's options, do not count.
    The files on the call stacks of the two constructors are added.
first-step
    One rank, from the call of ``DataParallel()`` to the return of the first ``run.step()``, on all
    threads.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from aladdin_mpi import DataParallel, simulate

SCRIPT = __file__
PACKAGE = Path(simulate.__file__).parent
ROLES = ("AladdinWorker", "AladdinServer")
"""Classes of the algorithm that is traced."""
PI = 7919
"""A value that occurs nowhere else in the run."""
OPTION = {PI, str(PI), "--aladdin-pi", "aladdin-pi", "aladdin_pi"}


# -- the training script ----------------------------------------------------------------------
def make_run(module: torch.nn.Module) -> DataParallel:
    """Construct the run; tracers recognise this function by its name."""
    return DataParallel(module, batch_size=8, epochs=3, lr=0.01, device="cpu", quiet=True)


def train_batch(
    run: DataParallel, module: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    """Train on one batch; tracers recognise this function by its name."""
    loss = (module(inputs) - targets).square().mean()
    loss.backward()
    run.step(loss)


def train() -> None:
    """Train a small model."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    run = make_run(module)
    # Otherwise buckets are sent after backward, at modelled times, and hooks have nothing to do.
    run.transport.models_time = False
    for inputs, targets in run.batches(data):
        train_batch(run, module, inputs, targets)


# -- tracers ----------------------------------------------------------------------------------
def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Iterate over a frame and its callers in the same greenlet."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_in_package(frame: FrameType) -> bool:
    """Return whether a frame runs code of the package."""
    return frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}")


def is_import(frame: FrameType) -> bool:
    """Return whether a frame runs the body of a module or class of the package."""
    return is_in_package(frame) and not frame.f_code.co_flags & inspect.CO_OPTIMIZED


def is_method(frame: FrameType, name: str) -> bool:
    """Return whether a frame runs a method of that name of the algorithm's worker or server."""
    return frame.f_code.co_name == name and type(frame.f_locals.get("self")).__name__ in ROLES


def engine_files(frame: FrameType) -> set[str]:
    """Return the files of the engine of the run that a frame or one of its callers holds.

    These are all in the folder of the transport's class, or only its own if Transport is there too.
    """
    values = (value for each in stack(frame) for value in each.f_locals.values())
    run = next(value for value in values if isinstance(value, DataParallel))
    engine = type(run.transport)
    own = inspect.getfile(engine)
    siblings = {str(path) for path in Path(own).parent.iterdir()}
    interface = {inspect.getfile(base) for base in engine.__mro__ if base.__name__ == "Transport"}
    return {own} if siblings & interface else siblings


class Tracer:
    """A profile function that collects files; the base class traces the first step."""

    command: tuple[object, ...] = (SCRIPT, "--algorithm", "ar-sgd", "--workers", 1, "--", "train")

    def __init__(self) -> None:
        self.is_on = False
        self.files: set[str] = set()
        self.engine: set[str] = set()

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """Handle an event of the interpreter."""
        code = frame.f_code
        if code.co_filename == SCRIPT:
            if code.co_name == "train_batch" and not self.engine:
                self.engine = engine_files(frame)
            self.mark(code.co_name, event)
        elif (
            self.is_on
            and is_in_package(frame)
            and code.co_filename not in self.files
            and not any(map(is_import, stack(frame)))
            and self.covers(frame, event, result)
        ):
            self.files.add(code.co_filename)

    def mark(self, function: str, event: str) -> None:
        """Start or finish at a function of the training script."""
        if function == "make_run" and event == "call":
            self.is_on = True
            self.files.clear()  # the simulation constructs it once before, to read its options
        elif function == "train_batch" and event == "return":
            self.finish()

    def covers(self, frame: FrameType, event: str, result: Any) -> bool:
        """Return whether an event counts."""
        return event == "call"

    def finish(self) -> None:
        """Print the files and end the process, as the rest of the run is of no interest."""
        files = sorted(str(Path(path).relative_to(PACKAGE)) for path in self.files - self.engine)
        print(json.dumps(files), flush=True)
        os._exit(0)


class GradientTracer(Tracer):
    """Follows gradients from backward to the server, and the model back to the worker."""

    command = (SCRIPT, "--algorithm", "aladdin", "--workers", 2, "--aladdin-pi", 1, "--", "train")
    batches = 0

    def mark(self, function: str, event: str) -> None:
        """Trace eight of the 24 batches, after each worker's second."""
        self.batches += function == "train_batch" and event == "call"
        self.is_on = self.batches > 4
        if self.batches > 12:
            self.finish()

    def covers(self, frame: FrameType, event: str, result: Any) -> bool:
        """Return whether a call comes from the training loop or from the algorithm."""
        for each in stack(frame) if event == "call" else ():
            if each.f_code.co_name == "batches":
                return False
            if each.f_code.co_name == "train_batch" or is_method(each, "run"):
                return True
        return False


class OptionTracer(Tracer):
    """Follows an option from the command line to the objects that use it."""

    command = ("--algorithm", "aladdin", "--workers", 1, "--aladdin-pi", PI, "--quiet")

    def __init__(self) -> None:
        super().__init__()
        self.is_on = True
        self.constructed: set[str] = set()

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """Handle an event; finish once the worker and the server are constructed."""
        super().__call__(frame, event, result)
        if event == "call" and is_method(frame, "__init__"):
            role = type(frame.f_locals["self"]).__name__
            if role in self.constructed:
                return  # the constructor of a base class
            self.constructed.add(role)
            self.files |= {f.f_code.co_filename for f in stack(frame) if is_in_package(f)}
            if len(self.constructed) == len(ROLES):
                self.engine = engine_files(frame)
                self.finish()

    def covers(self, frame: FrameType, event: str, result: Any) -> bool:
        """Return whether a function takes or returns the option."""
        values = frame.f_locals.values() if event == "call" else (result,)
        return any(map(carries, values))


def carries(value: Any, is_attribute: bool = False) -> bool:
    """Return whether a value is the option, a collection with it, or an object with it."""
    if type(value) in (str, int):
        return value in OPTION
    if isinstance(value, dict):
        return any(carries(each, is_attribute) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set):
        return any(carries(each, is_attribute) for each in value)
    attributes = {} if is_attribute else getattr(value, "__dict__", {})
    return any(carries(each, is_attribute=True) for each in attributes.values())


TRACERS = {"gradient": GradientTracer, "option": OptionTracer, "first-step": Tracer}


def main(trace: str) -> None:
    """Trace a run, or act as the training script of the traced run."""
    if trace == "train":
        train()
        return
    tracer = TRACERS[trace]()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    simulate.main([str(word) for word in tracer.command])
    raise SystemExit(f"{trace}: the run ended before the trace did")


if __name__ == "__main__":
    main(sys.argv[1])
