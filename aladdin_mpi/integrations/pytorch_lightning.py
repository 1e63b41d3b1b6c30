"""The strategy of :mod:`aladdin_mpi.integrations.lightning`, for ``pytorch_lightning.Trainer``."""

from __future__ import annotations

from aladdin_mpi.process import extras

extras.need("pytorch_lightning", __name__)

# isort: split
from pytorch_lightning.plugins.environments import LightningEnvironment  # noqa: E402
from pytorch_lightning.strategies import SingleDeviceStrategy  # noqa: E402

from aladdin_mpi.integrations.lightning_base.strategy import RunStrategy  # noqa: E402


class AladdinStrategy(RunStrategy, SingleDeviceStrategy):
    """See :class:`aladdin_mpi.integrations.lightning.AladdinStrategy`."""

    environment = LightningEnvironment
