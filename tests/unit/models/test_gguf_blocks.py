"""Blocks of GGUF's quantized types: their numbers are those of the `gguf` package, decoded or in groups."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf_files import quantize
from torch import Tensor

from eagleray.kernels.grouped import Encoding
from eagleray.models.gguf_blocks import FORMATS, grouped_weight

ROWS, COLUMNS = 6, 512
PLACES = {"Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}
"""Places of the float16 numbers in a block; other types have one at the beginning."""


def random_blocks(kind: str, seed: int = 0) -> np.ndarray:
    """Return any bytes as blocks, but for the float16 numbers in them, which have usual sizes."""
    layout, generator = FORMATS[kind].layout, np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (ROWS, COLUMNS // layout.block_size, layout.block_bytes), np.uint8)
    for place in PLACES.get(kind, (0,)):
        numbers = generator.uniform(-0.01, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    if kind == "Q8_0":
        blocks[..., 2:][blocks[..., 2:] == 128] = 127
    return blocks


def decoded(kind: str, blocks: np.ndarray) -> Tensor:
    stored = blocks.reshape(len(blocks), -1)
    return torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_of_any_bytes_are_those_of_the_gguf_package(kind):
    blocks = random_blocks(kind)
    groups = FORMATS[kind].split(torch.from_numpy(blocks))
    expected = decoded(kind, blocks)
    assert (groups.bits, groups.group_size) == (FORMATS[kind].bits, FORMATS[kind].group_size)
    torch.testing.assert_close(groups.numbers(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", FORMATS)
def test_grouped_weight_has_the_numbers_up_to_the_rounding_of_scales(kind):
    blocks = random_blocks(kind)
    weight = grouped_weight([FORMATS[kind].split(torch.from_numpy(blocks))])
    assert weight is not None
    assert weight.encoding is (Encoding.INT4 if kind.startswith("Q4") else Encoding.INT8)
    assert weight.scales.dtype == torch.float16
    expected = decoded(kind, blocks)
    step = weight.scales.float().abs().max()
    found = weight.dequantize(torch.float32)
    assert (found - expected).abs().max() < step / 50
    if kind in ("Q8_0", "Q4_0"):
        assert torch.equal(found, expected), "the scales are float16 numbers already"


def test_grouped_weight_of_several_types_has_eight_bits_and_the_smallest_groups():
    parts, expected = [], []
    for kind in ("Q4_K", "Q6_K", "Q8_0"):
        blocks = random_blocks(kind)
        parts.append(FORMATS[kind].split(torch.from_numpy(blocks)))
        expected.append(decoded(kind, blocks))
    weight = grouped_weight(parts)
    assert weight is not None
    assert (weight.encoding, weight.group_size, weight.shape) == (Encoding.INT8, 16, (3 * ROWS, COLUMNS))
    torch.testing.assert_close(weight.dequantize(torch.float32), torch.cat(expected), atol=2e-3, rtol=1e-3)


def test_grouped_weight_with_the_integer_minus_128_has_no_code_for_it():
    blocks = random_blocks("Q8_0")
    blocks[3, 5, 7] = 128
    groups = FORMATS["Q8_0"].split(torch.from_numpy(blocks))
    assert grouped_weight([groups]) is None
    torch.testing.assert_close(groups.numbers(), decoded("Q8_0", blocks))


def test_grouped_weight_of_small_scales_is_exact_and_of_large_ones_has_no_form():
    blocks = random_blocks("Q4_K")
    blocks[..., :4] = np.full((*blocks.shape[:2], 2), 1.2e-7, np.float16).view(np.uint8)
    weight = grouped_weight([FORMATS["Q4_K"].split(torch.from_numpy(blocks))])
    assert weight is not None
    assert torch.equal(weight.dequantize(torch.float32), decoded("Q4_K", blocks))
    blocks[0, 0, :2] = np.full(1, 60_000, np.float16).view(np.uint8)
    assert grouped_weight([FORMATS["Q4_K"].split(torch.from_numpy(blocks))]) is None


def test_cut_columns_on_and_off_the_borders_of_groups():
    groups = FORMATS["Q6_K"].split(torch.from_numpy(random_blocks("Q6_K")))
    cut = groups.cut_columns(range(48, 400))
    assert cut is not None
    assert torch.equal(cut.numbers(), groups.numbers()[:, 48:400])
    assert groups.cut_columns(range(40, 400)) is None
    assert groups.cut_columns(range(48, 401)) is None


@pytest.mark.parametrize(("kind", "error"), [("Q4_K", 0.1), ("Q6_K", 0.03)])
def test_quantizers_of_the_tests_are_near_the_numbers(kind, error):
    numbers = np.random.default_rng(0).normal(size=(3, 512)).astype(np.float32)
    found = quantize(numbers, kind).numbers
    assert np.sqrt(np.mean((found - numbers) ** 2)) < error
