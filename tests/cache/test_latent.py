from __future__ import annotations

import itertools

import pytest
import torch

from leyline.cache.latent import LatentCache, row_bytes

INV_FREQ = torch.tensor([0.5, 0.01], dtype=torch.float64)
# Neighbouring and scattered slots, each to each: a view of the cache may not be written into the
# cache by index, torch refuses it.
PLACES = [(3, 4, 5), (9, 12, 7), (0, 1, 2), (15, 11, 8)]


def filled(dtype: torch.dtype = torch.float32) -> LatentCache:
    cache = LatentCache(2, 16, 6, 4, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    cache.ckv.copy_(torch.randn(cache.ckv.shape, generator=generator))
    cache.kpe.copy_(torch.randn(cache.kpe.shape, generator=generator))
    return cache


def test_shapes_and_dtypes() -> None:
    cache = LatentCache(3, 10, 6, 4, dtype=torch.bfloat16)
    assert cache.ckv.shape == (3, 10, 6) and cache.ckv.dtype == torch.bfloat16
    assert cache.kpe.shape == (3, 10, 4) and cache.kpe.dtype == torch.float32
    assert len(cache.layers) == 3


def test_layers_are_views() -> None:
    cache = filled()
    cache.layers[1][0][5] = 7.0
    cache.layers[1][1][5] = 8.0
    assert (cache.ckv[1, 5] == 7).all() and (cache.kpe[1, 5] == 8).all()
    assert not (cache.ckv[0, 5] == 7).any()


@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(PLACES, 2)))
def test_move_carries_rows_and_turns_their_bands(
    src: tuple[int, ...], dst: tuple[int, ...]
) -> None:
    cache, before = filled(), filled()
    delta = torch.tensor([5, 0, -3])
    cache.move(torch.tensor(src), torch.tensor(dst), delta, INV_FREQ)
    assert torch.equal(cache.ckv[:, dst], before.ckv[:, src])
    pairs = torch.view_as_complex(before.kpe[:, src].unflatten(-1, (-1, 2)).contiguous())
    angle = delta[:, None] * INV_FREQ
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    torch.testing.assert_close(cache.kpe[:, dst], turned.float())
    assert torch.equal(cache.kpe[:, dst[1]], before.kpe[:, src[1]])
    rest = [slot for slot in range(16) if slot not in dst]
    assert torch.equal(cache.ckv[:, rest], before.ckv[:, rest])
    assert torch.equal(cache.kpe[:, rest], before.kpe[:, rest])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(cache.kpe[:, dst], 1.01 * turned.float())


def test_fill_overwrites_rows_in_every_layer() -> None:
    cache, before = filled(), filled()
    cache.fill(torch.tensor([2, 7]), float("nan"))
    assert cache.ckv[:, [2, 7]].isnan().all() and cache.kpe[:, [2, 7]].isnan().all()
    assert torch.equal(cache.ckv[:, 3:7], before.ckv[:, 3:7])


def test_row_bytes_counts_what_the_tensors_take() -> None:
    for dtype, rope_dtype in itertools.product((torch.bfloat16, torch.float32), repeat=2):
        cache = LatentCache(3, 10, 6, 4, dtype=dtype, rope_dtype=rope_dtype)
        expected = 10 * row_bytes(3, 6, 4, dtype, rope_dtype)
        assert cache.ckv.nbytes + cache.kpe.nbytes == expected
