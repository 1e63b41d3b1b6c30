"""Signs of the largest values: format, error feedback and edge cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import fsum, inf, log2, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aladdin_mpi.codec import signs
from aladdin_mpi.codec.quantise import Scratch
from aladdin_mpi.codec.signs import (
    PIECE,
    SMALLEST,
    SPAN,
    add,
    encode,
    encode_difference,
    expected_length,
    longest_message,
    scales_of,
)
from aladdin_mpi.transport.checksums import is_void, void

SHARES = [0.001, 0.02, 0.1, 0.38, 0.5, 0.9, 1.0]
SIZES = [6, 7, 31, 1000, SPAN, SPAN + 1, 2 * PIECE + 3 * SPAN + 77]
KINDS = ["normal", "tied", "sparse", "denormal", "wide", "equal"]
shares = pytest.mark.parametrize("share", SHARES)
sizes = pytest.mark.parametrize("numel", SIZES)


def drawn(numel: int, seed: int = 0, kind: str = "normal") -> Tensor:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=random)
    if kind == "tied":
        return (2 * x).round()
    if kind == "sparse":
        return x * (torch.rand(numel, generator=random) < 0.03)
    if kind == "denormal":
        return x * 1e-44
    if kind == "wide":
        return x * 10 ** (60 * torch.rand(numel, generator=random) - 35)
    return x.sign() * 3 if kind == "equal" else x


def sent(values: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the message and the residual; checks that the rest of the memory is unchanged."""
    longest = longest_message(values.numel())
    memory = torch.full((longest + 9,), nan)
    left = values.clone()
    message = encode(left, share, memory, Scratch())
    assert message.data_ptr() == memory.data_ptr()
    assert message.numel() <= longest
    assert memory[longest:].isnan().all()
    return message, left


def read(message: Tensor, numel: int, alpha: float = 1.0) -> Tensor:
    values = torch.zeros(numel)
    add(message, values, alpha)
    return values


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@contextmanager
def small_spans() -> Iterator[None]:
    """Make spans and pieces so small that few values have several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signs, "SPAN_BITS", 6)
        patch.setattr(signs, "SPAN", 64)
        patch.setattr(signs, "PIECE", 256)
        patch.setattr(signs, "SAMPLE", 16)
        yield


@contextmanager
def device_path(is_used: bool = True) -> Iterator[None]:
    """Encode and decode with the operations that accelerators use."""
    with pytest.MonkeyPatch.context() as patch:
        if is_used:
            patch.setattr(signs, "_on_host", lambda _: False)
        yield


# -- a slow reference -----------------------------------------------------------
def reference_positions(values: list[float], share: float) -> list[int]:
    """Return the positions that are selected in a span."""
    sizes = [abs(value) for value in values]
    if share >= 1:
        return list(range(len(values)))

    def chosen(sample: list[float]) -> list[int]:
        number = max(1, round(share * len(sample)))
        threshold = sorted(sample, reverse=True)[number - 1]
        return [i for i, size in enumerate(sizes) if size >= threshold and size > 0]

    stride = max(1, (len(values) // signs.SAMPLE - 1) | 1)
    result, sample, wanted = chosen(sizes[::stride]), sizes[::stride], share * len(values)
    positive = sorted(sample, reverse=True)[max(1, round(share * len(sample))) - 1] > 0
    too_few = positive and len(result) < 0.5 * wanted - signs.SLACK
    return chosen(sizes) if too_few or len(result) > 1.5 * wanted + signs.SLACK else result


def reference_body(selected: list[int], values: list[float], size: int, k: int) -> list[list[int]]:
    """Return the parts of a piece's body, as bits."""
    negative = [int(str(values[i]).startswith("-")) for i in selected]
    if len(selected) == size:
        return [negative]
    gaps = [here - before - 1 for before, here in zip([-1, *selected], selected, strict=False)]
    unary = [bit for gap in gaps for bit in [*[0] * (gap >> k), 1]]
    if selected and k == 0:
        unary += [0] * (size - len(unary))
    return [negative, [gap >> bit & 1 for bit in range(k) for gap in gaps], unary]


def reference_read(words: list[int], numel: int) -> dict[int, tuple[int, int]]:
    """Return each coded position's span and sign bit."""
    spans = -(-numel // signs.SPAN)
    full = numel // signs.SPAN * signs.SPAN
    starts = [*range(0, full, signs.PIECE), *([full] if full < numel else [])]
    end = spans + 3 * len(starts)
    result = {}
    for number, start in enumerate(starts):
        n, k, unary = words[spans + 3 * number : spans + 3 * number + 3]
        stop = numel if start == full else min(start + signs.PIECE, full)
        parts, at = [], 32 * end
        for length in (n, n * k, unary):
            parts.append([words[bit // 32] >> bit % 32 & 1 for bit in range(at, at + length)])
            at += -(-length // 8) * 8
        end = -(-at // 32)
        position, count = -1, 0
        ones = [i for i, bit in enumerate(parts[2]) if bit]
        if n == stop - start:
            positions = list(range(n))
        else:
            positions = []
            for count, (before, here) in enumerate(zip([-1, *ones], ones, strict=False)):
                low = sum(parts[1][plane * n + count] << plane for plane in range(k))
                position += ((here - before - 1) << k) + low + 1
                positions.append(position)
        for place, sign in zip(positions, parts[0], strict=True):
            result[start + place] = (start + place) // signs.SPAN, sign
    assert end == len(words)
    return result


def check_against_reference(values: Tensor, share: float) -> None:
    numel = values.numel()
    message, left = sent(values, share)
    if numel < SMALLEST:
        assert same_bits(message, values)
        assert not left.any()
        return
    coded = reference_read(
        [word & 0xFFFFFFFF for word in message.view(torch.int32).tolist()], numel
    )
    numbers, scales = values.tolist(), scales_of(message, numel)
    expected: list[int] = []
    for span, start in enumerate(range(0, numel, signs.SPAN)):
        part = numbers[start : start + signs.SPAN]
        selected = reference_positions(part, share)
        mean = fsum(abs(part[i]) for i in selected) / max(1, len(selected))
        assert float(scales[span]) == pytest.approx(mean, rel=1e-5, abs=2e-45)
        expected += [start + i for i in selected]
    assert list(coded) == expected
    for place, (span, sign) in coded.items():
        assert span == place // signs.SPAN
        assert sign == int(torch.signbit(values[place]))
    check_body_bits(message, numbers, expected)
    # The residual: value - (+-scale), rounded once; all other values are unchanged.
    places = torch.tensor(list(coded), dtype=torch.int64)
    rest = values.clone()
    rest[places] -= torch.copysign(scales[places // signs.SPAN], values[places])
    assert same_bits(left, rest)
    target = drawn(numel, 99)
    target[::5] = -0.0
    decoded = target.clone()
    decoded[places] += torch.copysign(scales[places // signs.SPAN], values[places])
    add(message, target)
    assert same_bits(target, decoded)


def check_body_bits(message: Tensor, numbers: list[float], expected: list[int]) -> None:
    """Check that the message contains what the slow encoder writes, padded with zeros."""
    numel = len(numbers)
    words = message.view(torch.int32).tolist()
    spans, full = -(-numel // signs.SPAN), numel // signs.SPAN * signs.SPAN
    starts = [*range(0, full, signs.PIECE), *([full] if full < numel else [])]
    stops = [*starts[1:], numel]
    bits: list[int] = []
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        selected = [i - start for i in expected if start <= i < stop]
        n, k, unary = words[spans + 3 * number : spans + 3 * number + 3]
        parts = reference_body(selected, numbers[start:stop], stop - start, k)
        assert [n, n * k, unary] == [*map(len, parts), *[0] * (3 - len(parts))]
        for part in parts:
            bits += part + [0] * (-len(part) % 8)
        bits += [0] * (-len(bits) % 32)
    body = message.view(torch.int32)[spans + 3 * len(starts) :].contiguous().view(torch.uint8)
    assert [byte >> bit & 1 for byte in body.tolist() for bit in range(8)] == bits


@given(
    st.integers(1, 700),
    st.sampled_from(SHARES) | st.floats(1e-4, 1.0),
    st.sampled_from(KINDS),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_message_agrees_with_slow_reference(
    numel: int, share: float, kind: str, seed: int, on_device: bool
) -> None:
    with small_spans(), device_path(on_device):
        check_against_reference(drawn(numel, seed, kind), share)


@pytest.mark.sample(4)
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("numel", [1000, SPAN + 1, PIECE + 9000])
def test_long_message_agrees_with_slow_reference(numel: int, share: float) -> None:
    check_against_reference(drawn(numel), share)


@sizes
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_accelerators_and_hosts_write_the_same(numel: int, share: float) -> None:
    values = drawn(numel, 1)
    message, left = sent(values, share)
    with device_path():
        other, rest = sent(values, share)
        assert same_bits(read(message, numel), read(other, numel))
    assert same_bits(message, other)
    assert same_bits(left, rest)
    assert same_bits(read(message, numel), read(other, numel))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_gpu_and_host_write_the_same_positions(share: float) -> None:
    numel = PIECE + SPAN + 77
    values = drawn(numel)
    message, _ = sent(values, share)
    left, memory = values.cuda(), torch.empty(longest_message(numel), device="cuda")
    other = encode(left, share, memory, Scratch())
    spans = scales_of(message, numel).numel()
    assert same_bits(message[spans:], other[spans:].cpu())
    target = drawn(numel, 2) * 1e-39
    copy = target.cuda()
    add(other.cpu(), target)
    add(other, copy)
    assert same_bits(target, copy.cpu())


# -- lengths ----------------------------------------------------------------------
def test_message_is_shorter_than_plain_values() -> None:
    lengths = [*range(1, 3000), *(n * SPAN + i for n in range(1, 25) for i in range(-9, 10))]
    for numel in lengths:
        longest = longest_message(numel)
        assert longest == numel if numel < SMALLEST else longest < numel
        for share in (1e-6, 0.02, 0.37, 0.5, 0.999, 1.0):
            assert 0 < expected_length(numel, share) <= longest


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0])
def test_length_is_close_to_entropy(share: float) -> None:
    numel = 1_000_000
    message, left = sent(drawn(numel), share)
    rest = 1 - share
    entropy = share - share * log2(share) - (rest * log2(rest) if rest else 0)
    assert message.numel() * 32 / numel == pytest.approx(entropy, rel=0.06)
    assert message.numel() == pytest.approx(expected_length(numel, share), rel=0.03)
    assert int(left.ne(drawn(numel)).sum()) == pytest.approx(share * numel, rel=0.03)


@shares
def test_clustered_positions_fit_in_longest_message(share: float) -> None:
    for numel in (SPAN, PIECE + 5):
        values = torch.zeros(numel)
        for start in (0, numel // 2, numel - 40):
            values[start : start + 40] = drawn(40)
            message, left = sent(values, share)
            torch.testing.assert_close(read(message, numel) + left, values)


# -- selection ------------------------------------------------------------------------
@given(st.integers(1, 3000), st.floats(1e-3, 0.99), st.sampled_from(KINDS), st.integers(0, 10**6))
def test_share_is_exceeded_only_by_ties(numel: int, share: float, kind: str, seed: int) -> None:
    with small_spans():
        values = drawn(numel, seed, kind)
        message, _ = sent(values, share)
        if numel < SMALLEST:
            return
        chosen = read(message, numel) != 0
        for part, mask in zip(values.split(64), chosen.split(64), strict=True):
            selected = part.abs()[mask]
            above = int((selected > selected.min()).sum()) if selected.numel() else 0
            assert above <= 1.5 * share * part.numel() + signs.SLACK
            if selected.numel():
                assert selected.min() >= part.abs()[~mask].max() if (~mask).any() else True


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_equal_magnitudes_are_encoded_exactly(share: float) -> None:
    values = drawn(PIECE + 1000, kind="equal")
    message, left = sent(values, share)
    assert not left.any()
    assert same_bits(read(message, values.numel()), values)
    assert message.numel() == expected_length(values.numel(), 1.0)


@pytest.mark.parametrize("is_large", [True, False])
def test_periodic_values_do_not_mislead_sample(is_large: bool) -> None:
    """The sample contains only the large or only the small values."""
    values = drawn(SPAN) * 1e-3
    stride = SPAN // signs.SAMPLE - 1
    values[0 if is_large else 1 :: stride] *= 1e6
    _, left = sent(values, 0.02)
    assert int(left.ne(values).sum()) == pytest.approx(0.02 * SPAN, rel=0.01)


@shares
@sizes
def test_zeros_stay_zero(numel: int, share: float) -> None:
    message, left = sent(torch.zeros(numel), share)
    assert not left.any()
    assert not read(message, numel).any()
    assert not scales_of(message, numel).any()
    if share < 1:
        assert message.numel() <= numel // SPAN + 1 + 3 * (numel // PIECE + 2)


# -- error feedback ---------------------------------------------------------------------
@shares
@pytest.mark.parametrize("numel", [1, 5, 6, 1000, 3 * SPAN + 5])
def test_decoded_values_and_residual_sum_to_values(numel: int, share: float) -> None:
    left, arrived, whole = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    memory, scratch = torch.empty(longest_message(numel)), Scratch()
    for seed in range(12):
        values = drawn(numel, seed)
        whole += values
        left += values
        add(encode(left, share, memory, scratch).clone(), arrived)
        torch.testing.assert_close(arrived + left, whole, rtol=1e-5, atol=1e-5)


def test_alpha_scales_decoded_values() -> None:
    message, _ = sent(drawn(1000), 0.1)
    assert torch.equal(read(message, 1000, -0.5), -0.5 * read(message, 1000))
    torch.testing.assert_close(read(message, 1000, 0.3), 0.3 * read(message, 1000))
    few, _ = sent(drawn(3), 0.1)
    assert same_bits(read(few, 3, 2.0), 2 * drawn(3))


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-37, 1e33])
def test_smallest_and_largest_values(share: float, size: float) -> None:
    values = drawn(1000).sign() * size
    message, left = sent(values, share)
    result = read(message, 1000)
    assert scales_of(message, 1000).isfinite().all()
    torch.testing.assert_close(result + left, values, rtol=1e-6, atol=0)
    assert (result.abs() <= 1.0001 * values.abs()).all()


@shares
@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("place", [0, SPAN + 300, 2 * SPAN + 99])
def test_non_finite_span_invalidates_message_but_not_residual(
    share: float, bad: float, place: int
) -> None:
    values = drawn(2 * SPAN + 100)
    values[place] = bad
    message, left = sent(values, share)
    assert not message[0].isnan()
    finite = scales_of(message, values.numel()).isfinite()
    assert finite.tolist() == [span != place // SPAN for span in range(3)]
    assert not read(message, values.numel()).isfinite().all()
    assert left.isfinite().all()
    assert [bool(part.any()) for part in left.split(SPAN)] == finite.tolist()


@shares
@pytest.mark.parametrize("numel", [4, 1000])
def test_message_of_nan_values_is_not_finite(share: float, numel: int) -> None:
    message, left = sent(torch.full((numel,), nan), share)
    assert not scales_of(message, numel).isfinite().any()
    assert not left.any()


def test_void_message_is_detected() -> None:
    message, _ = sent(drawn(1000), 0.1)
    assert not is_void(message)
    void(message)
    assert is_void(message)


# -- models -------------------------------------------------------------------------------
def check_shadow(values: Tensor, shadow: Tensor, share: float) -> None:
    memory, scratch = torch.empty(longest_message(values.numel())), Scratch()
    copy, kept = shadow.clone(), values.clone()
    for _ in range(4):
        message = encode_difference(values, shadow, share, memory, scratch)
        add(message.clone(), copy)
        assert same_bits(copy, shadow)
        assert same_bits(values, kept)


@given(
    st.integers(1, 600),
    st.sampled_from(SHARES),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.integers(0, 10**6),
)
def test_shadow_matches_copy_bit_for_bit(
    numel: int, share: float, kind: str, other: str, seed: int
) -> None:
    with small_spans():
        check_shadow(drawn(numel, seed, kind), -drawn(numel, seed + 1, other), share)


@shares
@sizes
def test_long_shadow_matches_copy_bit_for_bit(numel: int, share: float) -> None:
    check_shadow(drawn(numel), drawn(numel, 1), share)


def test_shadow_approaches_values() -> None:
    values, shadow = drawn(SPAN + 9), torch.zeros(SPAN + 9)
    memory, scratch = torch.empty(longest_message(values.numel())), Scratch()
    for _ in range(60):
        encode_difference(values, shadow, 0.1, memory, scratch)
    assert (values - shadow).abs().max() < 0.2
