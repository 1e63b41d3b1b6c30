"""Published values of Ko, Choi, Seo, Kim (IPDPS 2021, "An In-Depth Analysis of Distributed Training
of Deep Neural Networks"): speed from figures 2, 3 and 4, read off the vector graphics; accuracy
from tables II to IV."""

from __future__ import annotations

from dataclasses import dataclass

NETS = (10, 56)
"""Link rates in Gbit/s: Ethernet and InfiniBand."""
SERVED = ("bsp", "asp", "ssp")
ALGORITHMS = (*SERVED, "ar-sgd", "ad-psgd")
STAGES = ("none", "sharding", "wait-free", "dgc")
"""Stages of figure 4: each adds its optimisation to the previous ones."""


@dataclass(frozen=True)
class Network:
    """A network trained in the study.

    Attributes:
        model: value of ``--model``.
        batch: samples of a worker's step.
        seconds: time of a step's forward and backward pass on a TITAN V: the lowest bar of every
            panel of figure 3, to 0.01 s.
        bucket_mb: the largest message. It gives about one message per layer, since the study
            sends layer by layer.
        layers: number of layers with parameters, which limits the number of servers.
    """

    name: str
    model: str
    batch: int
    seconds: float
    bucket_mb: float
    layers: int


JITTER = 0.013
"""Jitter of a step's time: the fastest and the slowest of 24 workers are 5 % apart (section VI.C),
which is 3.9 standard deviations."""
NETWORKS = {
    "resnet50": Network("ResNet-50", "benchmarks.ipdps_run:resnet50", 128, 0.42, 2.0, 54),
    "vgg16": Network("VGG-16", "vgg16", 96, 0.66, 32.0, 16),
}

Curve = dict[int, float]


def _curve(workers: tuple[int, ...], text: str) -> Curve:
    return dict(zip(workers, map(float, text.split("/")), strict=True))


_LONG, _SHORT = (2, 4, 8, 16, 24), (8, 16, 24)

FIGURE_2: dict[tuple[str, int], dict[str, Curve]] = {
    ("resnet50", 10): {
        "bsp": _curve(_LONG, "1.6/2.27/4.05/7.68/10.56"),
        "asp": _curve(_LONG, "1.85/3.49/5.83/7.33/8.67"),
        "ssp": _curve(_LONG, "1.98/3.2/6.16/10.33/12.33"),
        "ar-sgd": _curve(_LONG, "1.96/3.8/5.6/9.6/11.8"),
        "ad-psgd": _curve(_LONG, "1.8/3.8/6.26/11.73/17.6"),
    },
    ("resnet50", 56): {
        "bsp": _curve(_SHORT, "4.16/7.79/11.2"),
        "asp": _curve(_SHORT, "6.33/12.16/14.26"),
        "ssp": _curve(_SHORT, "8.0/15.3/18.4"),
        "ar-sgd": _curve(_SHORT, "5.6/10.1/12.4"),
        "ad-psgd": _curve(_SHORT, "6.26/11.73/17.6"),
    },
    ("vgg16", 10): {
        "bsp": _curve(_SHORT, "2.04/3.55/3.73"),
        "asp": _curve(_SHORT, "1.42/2.16/2.16"),
        "ssp": _curve(_SHORT, "1.38/2.16/2.16"),
        "ar-sgd": _curve(_SHORT, "3.52/4.97/5.1"),
        "ad-psgd": _curve(_SHORT, "5.0/8.25/11.0"),
    },
    ("vgg16", 56): {
        "bsp": _curve(_SHORT, "2.31/4.08/4.8"),
        "asp": _curve(_SHORT, "1.42/2.16/2.16"),
        "ssp": _curve(_SHORT, "1.6/2.3/2.32"),
        "ar-sgd": _curve(_SHORT, "3.4/5.33/5.8"),
        "ad-psgd": _curve(_SHORT, "5.33/9.46/11.8"),
    },
}
"""Speedups by number of workers, with sharding and wait-free backpropagation."""

FIGURE_4: dict[tuple[str, int], dict[str, tuple[float, ...]]] = {
    ("resnet50", 10): {
        "bsp": (6.85, 10.44, 10.52, 12.20),
        "asp": (2.35, 7.40, 7.47, 16.70),
        "ssp": (3.59, 12.61, 14.28, 17.43),
    },
    ("resnet50", 56): {
        "bsp": (7.97, 10.52, 11.15, 12.99),
        "asp": (2.44, 12.28, 14.21, 16.69),
        "ssp": (3.58, 14.20, 18.33, 18.43),
    },
    ("vgg16", 10): {
        "bsp": (1.74, 2.29, 3.72, 14.19),
        "asp": (1.54, 2.09, 2.15, 18.63),
        "ssp": (1.84, 2.19, 2.21, 19.13),
    },
    ("vgg16", 56): {
        "bsp": (2.49, 3.82, 4.43, 14.18),
        "asp": (1.71, 2.19, 2.24, 18.63),
        "ssp": (2.14, 2.24, 2.27, 19.12),
    },
}
"""Speedups of 24 workers at each of :data:`STAGES`."""

TABLE_3 = {
    4: {"bsp": 75.14, "asp": 75.08, "ssp 3": 74.80, "ssp 10": 74.62, "easgd": 70.27}
    | {"gosgd": 67.75, "ad-psgd": 74.83},
    8: {"bsp": 75.09, "asp": 74.82, "ssp 3": 74.50, "ssp 10": 74.12, "easgd": 62.69}
    | {"gosgd": 58.45, "ad-psgd": 74.47},
    16: {"bsp": 74.96, "asp": 74.47, "ssp 3": 73.93, "ssp 10": 71.47, "easgd": 52.37}
    | {"gosgd": 49.22, "ad-psgd": 74.39},
    24: {"bsp": 75.11, "ar-sgd": 75.13, "asp": 74.59, "ssp 3": 72.82, "ssp 10": 64.48}
    | {"easgd": 45.28, "gosgd": 39.38, "ad-psgd": 74.11},
}
"""Top-1 accuracy in % of ResNet-50 on ImageNet after 90 epochs, by number of workers. EASGD with
tau 8, GoSGD with p = 0.01; AR-SGD is from table II."""

TABLE_4 = {"bsp, dgc": 75.05, "asp, dgc": 74.40, "ssp 3, dgc": 72.95, "ssp 10, dgc": 65.42}
"""The same with deep gradient compression, 24 workers."""
