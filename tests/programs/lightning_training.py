"""Train with Lightning: on one process as it is, and by the strategy on all ranks.

Arguments: a function of this program, and an algorithm.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from aladdin_mpi.errors import UserError
from aladdin_mpi.integrations.lightning import AladdinStrategy

SAMPLES, BATCH = 48, 12
INPUTS = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(INPUTS, (INPUTS[:, 0] > 0).long() + (INPUTS[:, 1] > 0).long())


class Net(lightning.LightningModule):
    """A network of two layers, with the optimizer and scheduler of ``kind``."""

    def __init__(self, kind: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.validated: list[float] = []
        self.counted: list[float] = []

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(self.layers(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if self.kind == "skipped" and index == 2 else None

    def on_train_epoch_end(self) -> None:
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        self.trainer.should_stop |= self.kind == "stopped" and is_last

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        assert len(batch[0]) > 0 and outputs is not None

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log_dict({"val_count": float(len(batch[0]))}, reduce_fx="sum")
        self.log("val_loss", self.loss(batch))
        self.accuracy(self.layers(batch[0]), batch[1])
        self.log("val_accuracy", self.accuracy)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            figures = self.trainer.callback_metrics
            self.validated.append(figures["val_loss"].item())
            self.counted.append(figures["val_count"].item())

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer: Any
        scheduler: Any = None
        if self.kind == "adamw":
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        if self.kind == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, factor=0.3, threshold=0.2
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Data(lightning.LightningDataModule):
    """The data, in batches of ``size``."""

    def __init__(self, size: int, data: Any) -> None:
        super().__init__()
        self.size, self.data = size, data

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, self.size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(DATA, 20)

    test_dataloader = val_dataloader


def fit(model: Net, size: int, strategy: Any = "auto", data: Any = DATA, **how: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    plugins = [LightningEnvironment()] if strategy == "auto" else None
    fit_arguments = {"ckpt_path": how.pop("ckpt_path")} if "ckpt_path" in how else {}
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "enable_checkpointing": False, **quiet, **how},
        strategy=strategy,
        plugins=plugins,
    )
    trainer.fit(model, datamodule=Data(size, data), **fit_arguments)
    return trainer


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


CASES: dict[str, dict[str, Any]] = {
    "sgd": {"max_epochs": 3},
    "adamw": {"max_steps": 5, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
    "plateau": {"max_epochs": 4},
    "bfloat16": {"max_epochs": 3, "precision": "bf16-mixed"},
    "limited": {"max_epochs": 3, "limit_train_batches": 0.5},
    "skipped": {"max_epochs": 3},
    "stopped": {"max_epochs": 3},
    "partial": {"max_epochs": 1, "accumulate_grad_batches": 3},
}


def compare(algorithm: str) -> None:
    """Compare with one process and batches as large as those of all workers together."""
    for kind, how in CASES.items():
        real, model = Net(kind), Net(kind)
        theirs = fit(real, BATCH, **how)
        strategy = AladdinStrategy(algorithm=algorithm, run_dir=kind, quiet=True)
        ours = fit(model, BATCH // strategy.world_size, strategy, **how)
        difference = (flat(model) - flat(real)).abs().max().item()
        moved = (flat(real) - flat(Net())).abs().max().item()
        figures = [abs(a - b) for a, b in zip(real.validated, model.validated, strict=True)]
        counts = (theirs.current_epoch, theirs.global_step, real.counted) == (
            ours.current_epoch,
            ours.global_step,
            model.counted,
        )
        losses = max(figures, default=0.0)  # an epoch that is left is not validated
        print(f"{kind}: {difference:.1e} of {moved:.1e}, {losses:.1e} {counts}", flush=True)
    try:
        strategy = AladdinStrategy(algorithm=algorithm, quiet=True)
        fit(Net("adamw"), BATCH // 2, strategy, max_epochs=1, max_steps=5)
    except UserError as error:
        print(f"refused: {error}", flush=True)


def train(algorithm: str) -> None:
    """Train with callbacks and a logger, until validation gets worse; then test."""
    model = Net()
    checkpoints = ModelCheckpoint("checkpoints", "{epoch}-{val_loss:.3f}", monitor="val_loss")
    stopping = EarlyStopping("val_loss", min_delta=0.02, patience=1)
    strategy = AladdinStrategy(
        algorithm=algorithm, run_dir="run", quiet=True, slowdown={0: 8.0}, jitter=0.0
    )
    trainer = fit(
        model,
        4,
        strategy,
        max_epochs=40,
        callbacks=[checkpoints, stopping],
        enable_checkpointing=True,
        logger=CSVLogger("logs"),
        log_every_n_steps=1,
    )
    metrics = sorted(trainer.callback_metrics)
    (tested,) = trainer.test(model, datamodule=Data(4, DATA), verbose=False)
    best = trainer.test(model, datamodule=Data(4, DATA), verbose=False, ckpt_path="best")
    print(
        f"rank {strategy.global_rank} of {trainer.world_size}: {trainer.current_epoch} epochs, "
        f"tested {tested['test_loss']:.6f} best {best[0]['test_loss']:.6f}, "
        f"{metrics}, {checkpoints.best_model_path}, {flat(model).sum():.6f}, "
        f"validated {[round(each, 6) for each in model.validated]}",
        flush=True,
    )


def resume(algorithm: str) -> None:
    """Train, but suspend the first time after two epochs and a half."""

    class Suspended(Net):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if self.trainer.current_epoch == 2 and index == 2 and not os.path.exists("suspended"):
                open("suspended", "w").close()
                os.kill(os.getpid(), signal.SIGUSR1)

        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                with open("validated", "a") as file:
                    print(self.trainer.current_epoch, file=file)

    model, real = Suspended("plateau"), Net("plateau")
    strategy = AladdinStrategy(algorithm=algorithm, run_dir="run", resume="auto", quiet=True)
    stopping = EarlyStopping("val_loss", patience=9)
    trainer = fit(model, BATCH, strategy, max_epochs=5, callbacks=[stopping])
    theirs = fit(real, BATCH, max_epochs=5)
    print(f"difference {(flat(model) - flat(real)).abs().max().item():.1e}")
    print((trainer.current_epoch, trainer.global_step))
    print((theirs.current_epoch, theirs.global_step))


def mistake(algorithm: str) -> None:
    """Make a strategy with an algorithm that it does not support."""
    AladdinStrategy(algorithm=algorithm)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
