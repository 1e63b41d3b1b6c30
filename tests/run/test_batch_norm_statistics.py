"""Running statistics of batch norm, estimated anew for the global model."""

from __future__ import annotations

import torch
from torch import nn

from aladdin_mpi.run.measurement import reestimate_batch_norm


def test_they_are_the_plain_means_over_the_batches() -> None:
    """Not those of torch's momentum of 0.1, to which the first batches count next to nothing."""
    norm = nn.BatchNorm1d(2)
    with torch.no_grad():
        norm(torch.full((4, 2), 50.0))  # of a former model
    batches = [torch.randn(8, 2) * scale + scale for scale in (1.0, 2.0, 3.0, 10.0)]
    norm.eval()
    reestimate_batch_norm(norm, [((batch,), {}) for batch in batches])
    means = torch.stack([batch.mean(0) for batch in batches]).mean(0)
    variances = torch.stack([batch.var(0) for batch in batches]).mean(0)
    torch.testing.assert_close(norm.running_mean, means)
    torch.testing.assert_close(norm.running_var, variances)
    assert norm.momentum == 0.1
    assert not norm.training


def test_a_model_without_batch_norm_is_not_called() -> None:
    class Uncalled(nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    reestimate_batch_norm(Uncalled(), [((torch.zeros(1),), {})])
