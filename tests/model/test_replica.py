"""A model as one flat vector, and reports of complete buckets during backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.gradients import BucketWatch
from aladdin_mpi.flat.layout import Bucket, Layout, cut
from aladdin_mpi.flat.replica import PhantomReplica, Replica, outline


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 2))


def flat(tensors: list[Tensor]) -> Tensor:
    """Return the values of all parameters, last parameter first."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors[::-1]])


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


INPUTS = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def backward(module: nn.Module) -> None:
    module(INPUTS).square().sum().backward()


# -- the flat vector ---------------------------------------------------------------------


def test_replica_vector_holds_parameters_last_layer_first() -> None:
    module = perceptron()
    before = [p.detach().clone() for p in module.parameters()]
    replica = Replica(module)
    assert replica.numel == sum(p.numel() for p in before)
    assert torch.equal(replica.parameters, flat(before))
    assert replica.shapes == tuple(tuple(p.shape) for p in before[::-1])


class Scaled(nn.Module):
    """A parameter of the module itself, next to modules that have parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        first = nn.Linear(4, 3)
        self.inner = nn.Sequential(first, nn.BatchNorm1d(3))
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = first.weight
        self.last = nn.Linear(3, 2)


def test_replica_layer_is_one_modules_own_parameters() -> None:
    replica = Replica(Scaled())
    assert replica.layers == (8, 6, 15, 3)
    assert replica.shapes == ((2,), (2, 3), (3,), (3,), (3,), (3, 4), (3,))
    assert sum(replica.layers) == replica.numel


def test_phantom_replica_has_sizes_of_its_module() -> None:
    with torch.device("meta"):
        module = Scaled()
    module.last.bias.requires_grad_(False)
    sizes = outline(module)
    phantom = PhantomReplica(sum(sizes.layers), sizes)
    assert phantom.layers == (6, 6, 15, 3)
    assert phantom.shapes == ((2, 3), (3,), (3,), (3,), (3, 4), (3,))
    assert phantom.numel == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert PhantomReplica(7).layers == (7,)


def test_parameters_are_views_of_replica_vector() -> None:
    module = perceptron()
    outputs = module(INPUTS)
    replica = Replica(module)
    assert torch.equal(module(INPUTS), outputs)
    replica.parameters.mul_(2)
    assert torch.equal(replica.parameters, flat(list(module.parameters())))
    with torch.no_grad():
        next(module.parameters()).fill_(7)
    assert (replica.parameters[-35:] == 7).all()


def test_backward_writes_into_bound_vector() -> None:
    plain = perceptron()
    backward(plain)
    module = perceptron()
    replica = Replica(module)
    first, second = replica.new_vector(), replica.new_vector()
    for vector in (first, second, first):
        vector.fill_(7.0)
        replica.bind_gradients(vector)
        backward(module)
        replica.end_backward()
    assert torch.equal(first, flat(gradients(plain)))
    assert torch.equal(second, first)
    assert first.count_nonzero() > 50


def test_second_backward_accumulates_gradients() -> None:
    module = perceptron()
    replica = Replica(module)
    vector = replica.new_vector()
    replica.bind_gradients(vector)
    backward(module)
    replica.end_backward()
    once = vector.clone()
    backward(module)
    replica.end_backward()
    torch.testing.assert_close(vector, 2 * once)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.out = nn.Linear(4, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))


def test_tied_weights_are_stored_once_and_sum_both_gradients() -> None:
    module, plain = Tied(), Tied()
    plain.load_state_dict(module.state_dict())
    replica = Replica(module)
    assert replica.numel == 44
    assert module.out.weight is module.embed.weight
    vector = replica.new_vector()
    told: list[int] = []
    watch = replica.watch(small_buckets(replica))
    replica.bind_gradients(vector)
    watch.begin(lambda bucket: told.append(bucket.index))
    for each in (module, plain):
        each(torch.tensor([1, 2, 2])).square().sum().backward()
    watch.end()
    assert plain.embed.weight.grad is not None
    torch.testing.assert_close(vector, plain.embed.weight.grad.view(-1))
    assert told == list(range(len(told)))


def test_frozen_parameters_stay_outside_replica_vector() -> None:
    module = perceptron()
    first = next(module.parameters())
    first.requires_grad_(False)
    kept = first.clone()
    replica = Replica(module)
    assert replica.numel == sum(p.numel() for p in module.parameters()) - first.numel()
    assert any(buffer.data_ptr() == first.data_ptr() for buffer in replica.buffers())
    replica.parameters.zero_()
    assert torch.equal(first, kept)


def test_replica_buffers_match_module_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    names = [name for name, _ in module.named_buffers()]
    assert len(Replica(module).buffers()) == len(names) == 3


def test_channels_last_layout_is_kept() -> None:
    module = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    plain = nn.Conv2d(4, 6, 3)
    plain.load_state_dict(module.state_dict())
    replica = Replica(module)
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(module.weight, plain.weight)
    vector = replica.new_vector()
    replica.bind_gradients(vector)
    images = torch.randn(2, 4, 8, 8)
    module(images.contiguous(memory_format=torch.channels_last)).square().sum().backward()
    replica.end_backward()
    plain(images).square().sum().backward()
    assert module.weight.grad is not None
    assert plain.weight.grad is not None
    assert module.weight.grad.stride() == module.weight.stride()
    assert vector.data_ptr() <= module.weight.grad.data_ptr() < vector.data_ptr() + vector.nbytes
    torch.testing.assert_close(module.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)
    # One step on the flat vectors is a step on the weights.
    replica.parameters.sub_(vector, alpha=0.1)
    expected = plain.weight - 0.1 * plain.weight.grad
    torch.testing.assert_close(module.weight, expected, rtol=1e-4, atol=1e-4)


def test_replica_rejects_model_without_trainable_parameters() -> None:
    with pytest.raises(UserError, match=r"^model: .*requires? a gradient"):
        Replica(nn.ReLU())


class Mixed(nn.Module):
    """A layer in bfloat16 between two in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 6).bfloat16()
        self.last = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.middle(self.first(inputs).bfloat16())
        return self.last(hidden.float())


@pytest.mark.parametrize("watched", [False, True])
def test_mixed_dtypes_are_stepped_in_widest_dtype(watched: bool) -> None:
    alone, module = Mixed(), Mixed()
    replica = Replica(module)
    assert replica.parameters.dtype == torch.float32
    assert replica.numel == sum(p.numel() for p in alone.parameters())
    watch = replica.watch(small_buckets(replica)) if watched else None
    vector = replica.new_vector()
    for passes in (1, 2):
        alone.zero_grad()
        vector.fill_(7)
        replica.bind_gradients(vector)
        if watch is not None:
            watch.begin(lambda bucket: None)
        for number in range(passes):
            if watch is not None:
                watch.enabled = number == passes - 1
            backward(alone)
            backward(module)
        replica.end_backward()
        assert torch.equal(vector, flat([g.float() for g in gradients(alone)]))
    # A change below the precision of bfloat16 is kept and accumulates.
    replica.parameters.fill_(1)
    for _ in range(8):
        replica.parameters.add_(2.0**-10)
    replica.bind_gradients(vector)
    assert torch.equal(module.middle.bias, torch.full((6,), 1 + 2.0**-7, dtype=torch.bfloat16))
    assert module.middle.weight.grad is None


def test_changed_gradients_of_other_dtypes_are_rejected() -> None:
    module = Mixed()
    replica = Replica(module)
    watch = replica.watch(small_buckets(replica))
    replica.bind_gradients(replica.new_vector())
    watch.begin(lambda bucket: None)
    backward(module)
    assert module.middle.weight.grad is not None
    module.middle.weight.grad.mul_(2)
    with pytest.raises(UserError, match=r"step\(\).*wait_free=False"):
        replica.end_backward()


def test_replica_rejects_complex_parameters() -> None:
    with pytest.raises(UserError, match=r"^model: .*complex64"):
        Replica(nn.ParameterList([torch.zeros(2, dtype=torch.complex64), torch.zeros(2)]))


# -- buckets during backward ---------------------------------------------------------------


def small_buckets(replica: Replica) -> Layout:
    """Return a layout with seven values per bucket: layers are split, small ones share a bucket."""
    return cut(replica.numel, 1, bucket_mb=28e-6, shard_mb=1.0)


class Watched:
    """A watched module; ``told`` lists reported buckets, ``seen`` their gradients at that time."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replica = Replica(module)
        self.layout = small_buckets(self.replica)
        self.vector = self.replica.new_vector()
        self.told: list[int] = []
        self.seen = torch.full_like(self.vector, float("nan"))
        self.watch: BucketWatch = self.replica.watch(self.layout)
        self.replica.bind_gradients(self.vector)

    def begin(self) -> None:
        self.watch.begin(self.on_bucket)

    def on_bucket(self, bucket: Bucket) -> None:
        self.told.append(bucket.index)
        self.seen[bucket.part] = self.vector[bucket.part]

    @property
    def all(self) -> list[int]:
        return list(range(len(self.layout.buckets)))


def test_watch_reports_complete_buckets_in_order_during_backward() -> None:
    watched = Watched(perceptron())
    during: list[int] = []
    watched.module[1].register_full_backward_hook(  # type: ignore[index]
        lambda *_: during.append(len(watched.told))
    )
    for _ in range(3):
        watched.told.clear()
        watched.replica.bind_gradients(watched.vector)
        watched.begin()
        backward(watched.module)
        assert watched.told == watched.all
        watched.watch.end()
        assert watched.told == watched.all
        assert torch.equal(watched.seen, watched.vector)
    assert 0 < during[0] < len(watched.all)


class Branches(nn.Module):
    """Only one of two branches takes part in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)])
        self.out = nn.Linear(4, 2)
        self.turn = 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.branches[self.turn](inputs))


@pytest.mark.parametrize("turn", [0, 1])
def test_unused_parameters_have_zero_gradients(turn: int) -> None:
    module = Branches()
    module.turn = turn
    watched = Watched(module)
    watched.begin()
    backward(module)
    if turn == 0:  # the unused branch precedes the used one and delays it
        assert len(watched.told) < len(watched.all)
    watched.replica.end_backward()
    watched.watch.end()
    assert watched.told == watched.all
    unused = module.branches[1 - turn].weight.grad
    assert isinstance(unused, Tensor)
    assert unused.count_nonzero() == 0
    assert torch.equal(watched.seen, watched.vector)


@pytest.mark.parametrize("times", [1, 2])
def test_previous_contents_of_bound_vector_are_overwritten(times: int) -> None:
    """Nothing remains of earlier steps, whether or not a parameter is used."""
    module, plain = Branches(), Branches()
    plain.load_state_dict(module.state_dict())
    watched = Watched(module)
    for turn in (0, 1, 0):
        module.turn = plain.turn = turn
        watched.vector.fill_(float("nan"))
        watched.replica.bind_gradients(watched.vector)
        watched.begin()
        watched.watch.enabled = False  # as in `accumulate()`
        for _ in range(times - 1):
            backward(module)
        watched.watch.enabled = True
        backward(module)
        watched.replica.end_backward()
        watched.watch.end()
        plain.zero_grad()
        backward(plain)
        expected = [
            torch.zeros(p.numel()) if p.grad is None else times * p.grad.view(-1)
            for p in reversed(list(plain.parameters()))
        ]
        torch.testing.assert_close(watched.vector, torch.cat(expected))
        assert torch.equal(watched.seen, watched.vector)
        watched.told.clear()


def test_zero_grad_is_allowed_before_backward_and_rejected_after() -> None:
    module = perceptron()
    watched = Watched(module)
    watched.begin()
    module.zero_grad()
    backward(module)
    assert watched.told == watched.all
    module.zero_grad()
    with pytest.raises(UserError, match=r"\bzero_grad\(\).*step\(\)"):
        watched.replica.end_backward()


def test_zero_grad_between_accumulated_passes_is_rejected() -> None:
    module = perceptron()
    watched = Watched(module)
    watched.begin()
    watched.watch.enabled = False
    backward(module)
    module.zero_grad()
    with pytest.raises(UserError, match=r"\bzero_grad\(\).*step\(\)"):
        backward(module)


def test_sparse_gradients_are_copied_into_vector() -> None:
    module = nn.Embedding(7, 2, sparse=True)
    watched = Watched(module)
    watched.begin()
    module(torch.tensor([1, 1, 3])).sum().backward()
    watched.replica.end_backward()
    watched.watch.end()
    expected = torch.zeros(7, 2)
    expected[1], expected[3] = 2, 1
    assert torch.equal(watched.vector, expected.view(-1))


def test_second_backward_in_a_step_is_rejected() -> None:
    watched = Watched(perceptron())
    watched.begin()
    backward(watched.module)
    with pytest.raises(UserError, match=r"backward\(\).*run\.accumulate\(\)"):
        backward(watched.module)


def test_watch_reports_buckets_only_in_last_accumulated_backward() -> None:
    watched = Watched(perceptron())
    watched.begin()
    watched.watch.enabled = False
    backward(watched.module)
    assert watched.told == []
    once = watched.vector.clone()
    watched.watch.enabled = True
    backward(watched.module)
    assert watched.told == watched.all
    torch.testing.assert_close(watched.seen, 2 * once)


def test_watch_reports_no_bucket_outside_a_step() -> None:
    watched = Watched(perceptron())
    backward(watched.module)
    assert watched.told == []


def test_describe_names_memory_format_only_if_it_matters() -> None:
    """Dimensions of size 1 do not affect the memory format."""
    one, two = nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(2, 4, 3, bias=False)
    for module, told in ((one, "[4, 1, 3, 3]"), (two, "[4, 2, 3, 3] channels last")):
        turned = Replica(module.to(memory_format=torch.channels_last))
        assert turned.describe() == [told]
    assert Replica(nn.Conv2d(2, 4, 3, bias=False)).describe() == ["[4, 2, 3, 3]"]
