"""Latent attention of one sequence's new rows over its cached rows, in two equal forms.

With key n's latent c[n] and band b[n], head h's up-projections K_h [N, C] and V_h [V, C], and a
query (q, r) of head h:

    score[n] = scale * (q . K_h c[n] + r . b[n])
    out      = sum_n softmax(score)[n] V_h c[n]

*Absorbed* moves K_h to the query and V_h to the result, so that keys stay latents:

    fold:    q' = K_h^T q               score[n] = scale * (q' . c[n] + r . b[n])
    unfold:  out = V_h (sum_n p[n] c[n])

It costs 2C + R multiply-adds a head and pair of query and key. *Explicit* projects every key up
once, C (N + V) a head, and then costs N + R + V a pair. `prefer_absorbed` compares the two sums.
The last query may read every key, the one before it all but the last, and so on.

Softmax runs in float32. N may be 0: scores then come from the band alone, and nothing is folded.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# At this many (head, query) rows two matrix products and a softmax still beat the fused call.
FEW_ROWS = 96


def reference(
    q_nope: Tensor, q_rope: Tensor, ckv: Tensor, kpe: Tensor, kv_b: Tensor, scale: float
) -> Tensor:
    """The first two formulas, in float32: [H, T, V]."""
    nope, queries = q_nope.shape[-1], q_nope.shape[1]
    up = torch.einsum("hjc,sc->hsj", kv_b.float(), ckv.float())
    key = torch.cat([up[..., :nope], kpe.float().expand(kv_b.shape[0], -1, -1)], dim=-1)
    score = torch.cat([q_nope.float(), q_rope.float()], dim=-1) @ key.transpose(1, 2) * scale
    score = score.masked_fill(~causal_mask(queries, ckv.shape[0]), float("-inf"))
    return score.softmax(-1) @ up[..., nope:]


def example(
    heads: int = 3,
    queries: int = 4,
    keys: int = 11,
    latent: int = 12,
    rope_dim: int = 8,
    nope: int = 6,
    value: int = 10,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Seeded valid inputs: q_nope, q_rope, ckv, kpe, kv_b, scale; softmax has a shape."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    kv_b = normal(heads, nope + value, latent) * latent**-0.5
    return (
        normal(heads, queries, nope),
        normal(heads, queries, rope_dim),
        normal(keys, latent),
        normal(keys, rope_dim),
        kv_b,
        2.0 * (nope + rope_dim) ** -0.5,
    )


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """[T, keys] bool: whether each query may read each key, the last query reading all."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)


def prefer_absorbed(
    queries: int, keys: int, *, heads: int, latent: int, rope_dim: int, nope: int, value: int
) -> bool:
    """Whether the absorbed form needs fewer multiply-adds than the explicit one."""
    pairs = queries * keys
    folded = latent if nope else 0
    absorbed = pairs * (folded + rope_dim + latent) + queries * latent * (nope + value)
    explicit = pairs * (nope + rope_dim + value) + keys * latent * (nope + value)
    return heads * absorbed <= heads * explicit


def fold(q_nope: Tensor, kv_b: Tensor) -> Tensor | None:
    """Carry queries [H, T, N] into the latent: [H, T, C], or None where N is 0."""
    nope = q_nope.shape[-1]
    return torch.bmm(q_nope, kv_b[:, :nope]) if nope else None


def unfold(mixed: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    """Project mixed latents [H, T, C] to the heads' values [H, T, V]."""
    return torch.bmm(mixed, kv_b[:, nope:].transpose(1, 2))


def absorbed(
    q_latent: Tensor | None,
    q_rope: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    scale: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend in the latent.

    Args:
        q_latent: Folded queries [H, T, C] in the model's dtype; None where N is 0.
        q_rope: Turned rope queries [H, T, R] float32.
        ckv: Latents of the keys [keys, C] in the model's dtype, the queries' own included.
        kpe: Their rope band [keys, R], float32 or the model's dtype.
        scale: Factor on the scores.
        mask: `causal_mask(T, keys)`, if the caller has one; never changes the result.

    Returns:
        Mixed latents [H, T, C] in the model's dtype.

    Raises:
        ValueError: Shapes do not fit together.
    """
    _check(q_latent, q_rope, ckv, kpe, ckv.shape[1])
    if q_rope.shape[0] * q_rope.shape[1] <= FEW_ROWS:
        return _absorbed_few(q_latent, q_rope, ckv, kpe, scale)
    band_query, band = q_rope.to(ckv.dtype), kpe.to(ckv.dtype)
    query = band_query if q_latent is None else torch.cat([q_latent, band_query], dim=-1)
    key = band if q_latent is None else torch.cat([ckv, band], dim=-1)
    heads = q_rope.shape[0]
    return _fused(query, key.expand(heads, -1, -1), ckv.expand(heads, -1, -1), scale, mask)


def explicit(
    q_nope: Tensor,
    q_rope: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    kv_b: Tensor,
    scale: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend with keys and values projected up.

    Args:
        q_nope: Queries without position [H, T, N] in the model's dtype.
        q_rope: Turned rope queries [H, T, R] float32.
        ckv: As in `absorbed`.
        kpe: As in `absorbed`.
        kv_b: Key rows, then value rows, of every head [H, N + V, C] in the model's dtype.
        scale: Factor on the scores.
        mask: As in `absorbed`.

    Returns:
        Values [H, T, V] in the model's dtype.

    Raises:
        ValueError: Shapes do not fit together.
    """
    heads, width, latent = kv_b.shape
    _check(q_nope, q_rope, ckv, kpe, q_nope.shape[-1])
    if latent != ckv.shape[1] or heads != q_nope.shape[0]:
        raise ValueError(f"kv_b must be [{q_nope.shape[0]}, N + V, {ckv.shape[1]}]")
    nope = q_nope.shape[-1]
    up = F.linear(ckv, kv_b.reshape(heads * width, latent)).view(-1, heads, width).transpose(0, 1)
    band = kpe.to(ckv.dtype).expand(heads, -1, -1)
    query = torch.cat([q_nope, q_rope.to(ckv.dtype)], dim=-1)
    return _fused(query, torch.cat([up[..., :nope], band], dim=-1), up[..., nope:], scale, mask)


def _absorbed_few(
    q_latent: Tensor | None, q_rope: Tensor, ckv: Tensor, kpe: Tensor, scale: float
) -> Tensor:
    """Two matrix products around a softmax; the band's share of the scores in the band's dtype."""
    heads, queries, rope_dim = q_rope.shape
    keys, latent = ckv.shape
    rows = heads * queries
    score = q_rope.reshape(rows, rope_dim).to(kpe.dtype) @ kpe.T
    score = score.to(torch.float32)
    if q_latent is not None:
        score += q_latent.reshape(rows, latent) @ ckv.T
    score *= scale
    if queries > 1:
        newest = score.view(heads, queries, keys)[..., keys - queries :]
        newest.masked_fill_(~causal_mask(queries, queries, ckv.device), float("-inf"))
    mixed = score.softmax(-1).to(ckv.dtype) @ ckv
    return mixed.view(heads, queries, latent)


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """torch's fused attention; it is fast only where keys and values are equally wide."""
    queries, keys, wanted = query.shape[1], key.shape[1], value.shape[2]
    width = max(key.shape[2], wanted)
    query, key, value = (F.pad(x, (0, width - x.shape[2]))[None] for x in (query, key, value))
    whole = queries == keys
    if not whole and mask is None:
        mask = causal_mask(queries, keys, query.device)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=None if whole else mask, is_causal=whole, scale=scale
    )
    return out[0, ..., :wanted]


def _check(query: Tensor | None, q_rope: Tensor, ckv: Tensor, kpe: Tensor, width: int) -> None:
    heads, queries, rope_dim = q_rope.shape
    if query is not None and query.shape != (heads, queries, width):
        raise ValueError(f"queries must be [{heads}, {queries}, {width}], not {query.shape}")
    if kpe.shape != (ckv.shape[0], rope_dim):
        raise ValueError(f"kpe must be [{ckv.shape[0]}, {rope_dim}], not {tuple(kpe.shape)}")
    if queries > ckv.shape[0]:
        raise ValueError(f"{queries} queries over {ckv.shape[0]} keys: their own rows are missing")
