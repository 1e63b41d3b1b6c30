"""Small networks with the timing of the studies' large ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aladdin_mpi.exchange.model_requests import MOMENTS

HOSTS = 4
GBIT = 10.0
BUCKET_MB = 4.0
"""Largest message of the large network, in MB."""

Published = Mapping[str, tuple[float, float | None]]
"""Test accuracy in % by label, and hours to the study's target if published."""


@dataclass(frozen=True)
class Stand:
    """A small network in place of a large one.

    Args:
        model: the model of `aladdin_mpi.simulate`, with ``megabytes`` of parameters.
        original: the large network, of ``original_mb``; its step takes ``seconds``.
        published: values in table 2 of the ALADDIN paper, with the hours to 90 %. The study's SGP
            overlaps its messages with a step, which is `osgp` here.
    """

    model: str
    megabytes: float
    original: str
    original_mb: float
    seconds: float
    published: Published

    @property
    def scale(self) -> float:
        """The size of the small network relative to the large one."""
        return self.megabytes / self.original_mb

    def options(self, hosts: int = HOSTS) -> list[str]:
        """Return options for time and network that keep communication's share of a step.

        With more hosts and servers, buckets are as small as `aladdin-ahead` would choose for the
        large network; its lower bound on message sizes would prevent that here.
        """
        bucket = BUCKET_MB if hosts <= HOSTS else self.original_mb / hosts / MOMENTS
        values = {
            "--compute-time": self.seconds,
            "--hosts": hosts,
            "--bandwidth-gbit": GBIT * self.scale,
            "--bucket-mb": min(BUCKET_MB, bucket) * self.scale,
            "--shard-mb": 16 * self.scale,
        }
        return [str(word) for pair in values.items() for word in pair]


RESNET = Stand(
    "resnet20",
    1.09,
    "ResNet-50",
    94.0,
    0.447,
    {
        "ar-sgd": (93.53, 0.98),
        "asp": (93.15, 1.16),
        "easgd": (91.12, 1.36),
        "osgp": (93.40, 1.15),
        "aladdin": (93.78, 0.92),
    },
)
VGG = Stand(
    "vgg8_cifar",
    15.7,
    "VGG-16",
    552.0,
    0.849,
    {
        "ar-sgd": (92.38, 6.40),
        "asp": (91.71, 8.22),
        "easgd": (91.24, 6.18),
        "osgp": (92.28, 3.94),
        "aladdin": (92.26, 2.87),
    },
)
STANDS = {"resnet": RESNET, "vgg": VGG}
