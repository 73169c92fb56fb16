"""The reference of every splice: `transformers`' cache, edited by hand.

It shares no code with Leyline. Rows are what `transformers` computed; an edit drops rows, turns the
rope part of those behind it with the rotation written here, and gives them new positions; whatever
must be computed is computed by `transformers` at explicit positions over the rows that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

INTERLEAVED = ("deepseek_v2",)  # the other classes store even elements first, then odd ones

Layer = tuple[Tensor, Tensor]  # latents [T, C] and roped bands [T, R]
Edit = tuple[int, int, Sequence[int], str]  # start, end, replacement, mode


@dataclass
class HandCache:
    """A conversation in `transformers`: tokens, and the rows of the first of them.

    Attributes:
        model: The model in float32.
        tokens: All token ids; those behind the rows are still to be computed.
        layers: Rows of each layer.
        grafted: Whether each row was carried over from an earlier context.
    """

    model: Any
    tokens: list[int] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    grafted: list[bool] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.layers[0][0].shape[0] if self.layers else 0

    def clone(self, length: int | None = None) -> HandCache:
        """The first `length` tokens and their rows, to be edited on their own."""
        cut = [(latent[:length], band[:length]) for latent, band in self.layers]
        return HandCache(self.model, self.tokens[:length], cut, self.grafted[:length])

    def compute(self, end: int | None = None) -> Tensor:
        """Compute the rows of tokens up to `end`; logits [n, V] of those that were missing."""
        first, end = self.num_rows, len(self.tokens) if end is None else end
        ids = torch.tensor([self.tokens[first:end]])
        positions = torch.arange(first, end)[None]
        with torch.inference_mode():
            output = self.model(
                input_ids=ids, position_ids=positions, cache=self._cache(), use_cache=True
            )
        self.layers = [(one.keys[0, 0], one.values[0, 0]) for one in output.cache.layers]
        self.grafted += [False] * (end - first)
        return output.logits[0]

    def forget_rows(self, length: int) -> None:
        """Drop the rows from position `length` on."""
        self.layers = self.clone(length).layers
        self.grafted = self.grafted[:length]

    def edit(self, directives: Sequence[Edit]) -> None:
        """Carry out directives one by one from right to left.

        Every replacement is computed behind the rows in front of it, which no directive has
        touched yet; one that lies behind the last row is only text.
        """
        for directive in reversed(sorted(directives, key=lambda one: (one[0], one[1]))):
            self._edit_one(*directive)

    def _edit_one(self, start: int, end: int, replacement: Sequence[int], mode: str) -> None:
        """One directive."""
        tail = self.tokens[end:]
        if start > self.num_rows:
            self.tokens[start:end] = replacement
            return
        head = self.clone(start)
        head.tokens += [*replacement, *(tail if mode == "forget" else ())]
        if len(head.tokens) > start:
            head.compute()
        if mode != "forget":
            self._carry(head, end, len(replacement) - (end - start))
            head.tokens += tail
        self.tokens, self.layers, self.grafted = head.tokens, head.layers, head.grafted

    def _carry(self, head: HandCache, start: int, delta: int) -> None:
        """Append the rows from `start` on to `head`, turned by `delta` positions."""
        before = head.layers or self.clone(0).layers
        bands = [self.turn(band[start:], delta) for _, band in self.layers]
        head.layers = [
            (torch.cat((latent, old[start:])), torch.cat((band, turned)))
            for (latent, band), (old, _), turned in zip(before, self.layers, bands, strict=True)
        ]
        head.grafted += [True] * max(0, self.num_rows - start)

    def turn(self, band: Tensor, delta: int) -> Tensor:
        """Rope parts [T, R] at positions later by `delta`: complex factors e^(i angle)."""
        inv_freq = self.model.model.rotary_emb.inv_freq.double()
        half = band.shape[-1] // 2
        if self.model.config.model_type in INTERLEAVED:
            even, odd = band[:, 0::2], band[:, 1::2]
        else:
            even, odd = band[:, :half], band[:, half:]
        turned = torch.complex(even.double(), odd.double()) * torch.polar(
            torch.ones_like(inv_freq), delta * inv_freq
        )
        if self.model.config.model_type in INTERLEAVED:
            return torch.view_as_real(turned).flatten(1).float()
        return torch.cat((turned.real, turned.imag), dim=-1).float()

    def _cache(self) -> Any:
        """The rows as a cache of `transformers`."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        if self.num_rows:
            for index, (latent, band) in enumerate(self.layers):
                cache.update(latent[None, None], band[None, None], index)
        return cache
