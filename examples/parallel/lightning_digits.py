"""Classify digits with Lightning: a module with metrics, checkpoints and early stopping.

mpirun -np 3 python lightning_digits.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from aladdin_mpi import load_dataset
from aladdin_mpi.integrations.lightning import AladdinStrategy

EPOCHS = 8


class Classifier(lightning.LightningModule):
    """Two layers, trained with AdamW and one cycle of the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a batch: images (N, 1, 8, 8) and labels (N,)."""
        images, labels = batch
        loss = functional.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log loss and accuracy of a batch."""
        images, labels = batch
        outputs = self.layers(images)
        self.log("val_loss", functional.cross_entropy(outputs, labels))
        self.log("val_accuracy", (outputs.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and a scheduler that advances with every step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    """Train, and validate after each epoch."""
    torch.manual_seed(0)
    data: Any = load_dataset("digits")
    trainer = lightning.Trainer(
        strategy=AladdinStrategy(),
        max_epochs=EPOCHS,
        accelerator="cpu",
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss", patience=3)],
        logger=False,
        enable_progress_bar=False,
    )
    train_loader: Any = DataLoader(data.train, 32, shuffle=True)
    test_loader: Any = DataLoader(data.test, 100)
    trainer.fit(Classifier(), train_loader, test_loader)
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
