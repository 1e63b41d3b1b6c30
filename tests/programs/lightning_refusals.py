"""Call ``fit()`` with each feature that a run cannot support; print the errors.

The last one trains in one process, with ``pytorch_lightning``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytorch_lightning
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer
from torch import optim
from torch.utils.data import DataLoader, IterableDataset

from aladdin_mpi.errors import UserError
from aladdin_mpi.integrations.lightning import AladdinStrategy
from aladdin_mpi.integrations.pytorch_lightning import AladdinStrategy as OtherStrategy
from tests.programs.lightning_training import DATA, Net, fit


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clipping(Net):
    def configure_gradient_clipping(self, *arguments: Any, **how: Any) -> None:
        pass


class Schedule(Net):
    """Its configuration of the scheduler has other settings."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = config

    def configure_optimizers(self) -> Any:
        optimizer = optim.SGD(self.parameters(), lr=0.1)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, **self.config}]


class Partial(Net):
    def configure_optimizers(self) -> Any:
        return optim.SGD(self.layers[0].parameters(), lr=0.1)


class Unsized(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


class Closure(Net):
    def configure_optimizers(self) -> Any:
        return optim.LBFGS(self.parameters())


def refusal(model: Any = None, settings: dict[str, Any] | None = None, **how: Any) -> str:
    """Return the error of ``fit()``."""
    try:
        strategy = AladdinStrategy(**{"quiet": True, **(settings or {})})
        fit(model or Net(), 4, strategy, **{"max_epochs": 1, **how})
    except UserError as error:
        return str(error)
    return "trained"


class Gathering(Net):
    def training_step(self, batch: Any, index: int) -> Any:
        self.all_gather(batch[0])
        return super().training_step(batch, index)


def main() -> None:
    for name, error in {
        "epochs": refusal(settings={"epochs": 1}),
        "ssp": refusal(settings={"algorithm": "ssp"}),
        "manual": refusal(Manual()),
        "clipping": refusal(Clipping()),
        "value": refusal(gradient_clip_val=1.0, gradient_clip_algorithm="value"),
        "frequency": refusal(Schedule(interval="step", frequency=2)),
        "closure": refusal(Closure()),
        "interval": refusal(val_check_interval=0.5),
        "endless": refusal(max_epochs=-1),
        "partial": refusal(Partial(), gradient_clip_val=1.0),
        "unsized": refusal(data=Unsized(), max_steps=5),
        "schedule": refusal(data=Unsized(), max_epochs=None, max_steps=5),
        "devices": refusal(devices=2),
        "batchnorm": refusal(sync_batchnorm=True),
        "reload": refusal(reload_dataloaders_every_n_epochs=1),
        "timer": refusal(callbacks=[Timer("00:01:00:00")]),
        "accumulation": refusal(callbacks=[GradientAccumulationScheduler({1: 2})]),
        "checkpoint": refusal(ckpt_path="any.ckpt"),
        "trained": refusal(Gathering()),
    }.items():
        print(f"{name}: {error}", flush=True)
    trainer = pytorch_lightning.Trainer(
        strategy=OtherStrategy(quiet=True),
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )

    class Line(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net.loss(batch)

        def configure_optimizers(self) -> Any:
            return optim.SGD(self.parameters(), lr=0.1)

    trainer.fit(Line(), DataLoader(DATA, 4))
    print(f"pytorch_lightning: {trainer.global_step} steps")


if __name__ == "__main__":
    main()
