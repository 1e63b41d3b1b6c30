"""A strategy for ``lightning.Trainer`` that trains with any algorithm.

An existing script changes in two lines, the import and the strategy::

    from aladdin_mpi.integrations.lightning import AladdinStrategy

    trainer = lightning.Trainer(strategy=AladdinStrategy(), max_epochs=3)
    trainer.fit(model, loader)

Start it with ``mpirun -np 4 python script.py``. For the package ``pytorch_lightning``, import
:mod:`aladdin_mpi.integrations.pytorch_lightning` instead.
"""

from __future__ import annotations

from aladdin_mpi.process import extras

extras.need("lightning", __name__)

# isort: split
from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

from aladdin_mpi.integrations.lightning_base.strategy import RunStrategy  # noqa: E402


class AladdinStrategy(RunStrategy, SingleDeviceStrategy):
    """Training of a ``LightningModule`` by a :class:`aladdin_mpi.DataParallel`.

    The ``Trainer`` and the module determine the run: its length, accumulation, clipping, optimizer
    and scheduler. Batches of the training loader are divided among the workers. On a server's rank,
    ``fit()`` serves the workers until training ends. Afterwards, on every rank, the module is the
    trained global model, and callbacks and metrics have the first worker's state.

    Validation takes place on every worker, with all samples; figures that are logged in it, and
    torchmetrics, are combined over the workers, whose models differ with some algorithms. Figures
    logged in training are the worker's own. ``test()``, ``validate()`` and ``predict()`` do not
    communicate: each rank evaluates all samples.

    Args:
        settings: of :class:`aladdin_mpi.DataParallel`, such as ``algorithm`` and ``run_dir``,
            except those that the ``Trainer`` determines.

    Raises:
        UserError: a setting that the ``Trainer`` determines, or an unknown algorithm; in ``fit()``,
            a feature that cannot work, such as manual optimization.
    """

    environment = LightningEnvironment
