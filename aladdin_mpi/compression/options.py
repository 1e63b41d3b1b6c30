"""The options of compression."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DgcOptions(BaseModel):
    """For --compression dgc (Lin et al., ICLR 2018)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ratio: float = Field(
        0.001,
        gt=0,
        le=1,
        description="share of the values of each matrix or kernel that a gradient sends; biases "
        "and other vectors are sent whole; 1: everything is sent, as without compression",
        json_schema_extra={"unit": "SHARE"},
    )
    warmup_epochs: int = Field(
        4,
        ge=0,
        description="epochs in which the share falls to --dgc-ratio, by one factor each epoch: "
        "25, 6.3, 1.6 and 0.4 percent on the way to 0.1",
        json_schema_extra={"unit": "EPOCHS"},
    )
    clip: float | None = Field(
        None,
        gt=0,
        description="largest L2 norm of the sum of all workers' gradients; with n workers each "
        "clips its own to 1/sqrt(n) of it, every bucket to its share",
        json_schema_extra={"unit": "NORM", "default_text": "gradients are not clipped"},
    )
    sample: float = Field(
        0.01,
        gt=0,
        le=1,
        description="share of the values from which the threshold is estimated",
        json_schema_extra={"unit": "SHARE"},
    )

    def ratio_at(self, samples: int, epoch: int) -> float:
        """The share of values that is sent.

        It falls exponentially, by one step an epoch, as in section 3.3 of the paper.

        Args:
            samples: drawn by all workers so far.
            epoch: samples of one epoch.
        """
        passed = min(samples // max(1, epoch), self.warmup_epochs)
        return self.ratio ** ((passed + 1) / (self.warmup_epochs + 1))
