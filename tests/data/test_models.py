"""Models by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from aladdin_mpi.data import models
from aladdin_mpi.data.models import SMALL_MODELS, _BasicBlock, build_model, list_models
from aladdin_mpi.errors import UserError


def parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_small_models_return_logits_and_gradients(name: str) -> None:
    model = build_model(name, num_classes=7)
    logits = model(torch.randn(4, 3, 32, 32))
    assert logits.shape == (4, 7)
    logits.square().sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in model.parameters())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("resnet20", 269_722), ("resnet56", 853_018), ("vgg16_bn_cifar", 14_724_042)],
)
def test_model_sizes_match_papers(name: str, expected: int) -> None:
    assert parameters(build_model(name, 10)) == expected


def test_digits_model_has_fewer_than_50000_parameters() -> None:
    assert parameters(build_model("digits", 10, in_channels=1, image_size=8)) < 50_000


def test_padded_shortcut_subsamples_and_pads() -> None:
    x = torch.rand(2, 4, 6, 6)
    block = _BasicBlock(4, 8, stride=2)
    torch.nn.init.zeros_(block.bn2.weight)
    out = block(x)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, :2].any() and not out[:, 6:].any()


def torchvision_names() -> list[str]:
    """Return one model of each family, the smallest; the others differ in width and depth."""
    chosen = (
        "convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet mnasnet0_5 "
        "mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnet50 "
        "shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vit_b_32"
    )
    return chosen.split()


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", torchvision_names())
def test_torchvision_models_train_on_small_images(name: str) -> None:
    model = build_model(name, num_classes=5, image_size=32)
    logits = model(torch.randn(2, 3, 32, 32))
    assert model.training and logits.shape == (2, 5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "side"), [("inception_v3", 75), ("alexnet", 64)])
def test_torchvision_models_for_larger_images_return_logits(name: str, side: int) -> None:
    logits = build_model(name, 5, image_size=side)(torch.randn(2, 3, side, side))
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, 5)


def test_list_models_has_unique_classification_models() -> None:
    names = list_models()
    assert len(names) == len(set(names)) > 70
    assert {"digits", "resnet50", "vgg16", "vit_b_16"} <= set(names)
    assert not {"fcn_resnet50", "fasterrcnn_resnet50_fpn", "raft_small"} & set(names)


def test_model_weights_depend_on_seed_alone() -> None:
    def weights() -> torch.Tensor:
        torch.manual_seed(4)
        return nn.utils.parameters_to_vector(build_model("resnet18", 3).parameters())

    assert torch.equal(weights(), weights())


def test_torchvision_models_repeat_single_channel() -> None:
    torch.manual_seed(0)
    grey = build_model("resnet18", 5, in_channels=1).eval()
    torch.manual_seed(0)
    colour = build_model("resnet18", 5).eval()
    assert grey.state_dict().keys() == colour.state_dict().keys()
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(grey(x), colour(x.repeat(1, 3, 1, 1)))
    for copied in (copy.deepcopy(grey), pickle.loads(pickle.dumps(grey))):
        assert torch.equal(copied(x), grey(x))


def test_small_models_accept_any_number_of_channels() -> None:
    assert build_model("mlp", 3, in_channels=2, image_size=8)(torch.randn(1, 2, 8, 8)).shape == (
        1,
        3,
    )


def test_build_model_rejects_unsupported_image_size() -> None:
    with pytest.raises(UserError, match=r"--model alexnet.*32x32"):
        build_model("alexnet", 10, image_size=32)
    with pytest.raises(UserError, match=r"--model vgg16_bn_cifar.*8x8"):
        build_model("vgg16_bn_cifar", 10, image_size=8)


def test_build_model_rejects_unsupported_channels() -> None:
    with pytest.raises(UserError, match=r"--model resnet18.*\b3\b.*\b2\b"):
        build_model("resnet18", 10, in_channels=2)


def test_build_model_suggests_close_names_for_unknown_model() -> None:
    with pytest.raises(UserError, match=r"--model.*\bmlp\b.*'resnet5'.*resnet50"):
        build_model("resnet5", 10)


FUNCTIONS = "tests.data.programs.model_functions"


def test_model_function_receives_parameters_it_accepts() -> None:
    assert build_model(f"{FUNCTIONS}:plain", 5).out_features == 3
    sized = build_model(f"{FUNCTIONS}:sized", 5, image_size=8)
    assert (sized.in_features, sized.out_features) == (8, 5)
    assert build_model(f"{FUNCTIONS}:free", 5).out_features == 5


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        ("no_such_module:f", "no_such_module.*PYTHONPATH"),
        ("{}:plane", "'plane'.*plain"),
        ("{}:wrong", r"torch\.nn\.Module.*\bint\b"),
        ("{}:greedy", "num_classes.*width, head"),
    ],
)
def test_build_model_rejects_invalid_model_function(spec: str, cause: str) -> None:
    with pytest.raises(UserError, match=f"--model .*{cause}"):
        models.build_model(spec.format(FUNCTIONS), 5)
