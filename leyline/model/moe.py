"""The feed-forward half of a layer: one MLP, or a router with experts and a shared MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from leyline.kernels.experts import experts
from leyline.kernels.router import Routing, route
from leyline.model.config import ModelConfig
from leyline.model.linear import Linear
from leyline.model.parameters import WeightSource


class Mlp:
    """down(silu(gate x) * up x), with gate and up as one projection.

    Args:
        weights: Where the parameters come from.
        prefix: What their names begin with, the dot included.
        dtype: Dtype of the projections.
    """

    def __init__(self, weights: WeightSource, prefix: str, dtype: torch.dtype) -> None:
        both = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
        self._gate_up = Linear.load(weights, both, dtype)
        self._down = Linear.load(weights, (f"{prefix}down_proj.weight",), dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] to [T, D], both in the model's dtype."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))


class MixtureOfExperts:
    """Routed experts plus, unscaled, the shared MLP.

    `n_shared_experts` shared experts are one MLP of that many times the width.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightSource, prefix: str, dtype: torch.dtype
    ) -> None:
        self._routing = Routing(
            top_k=config.num_experts_per_tok,
            scoring_func=config.scoring_func,
            topk_method=config.topk_method,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            n_group=config.n_group,
            topk_group=config.topk_group,
        )
        # Router and bias stay in float32 whatever the model's dtype.
        self._gate = weights.take(f"{prefix}gate.weight", torch.float32)
        self._bias = (
            weights.take(f"{prefix}gate.e_score_correction_bias", torch.float32)
            if config.has_router_bias
            else None
        )
        self._gate_up, self._down = _stack_experts(
            config, weights, prefix, dtype, self._gate.device
        )
        self._shared = (
            Mlp(weights, f"{prefix}shared_experts.", dtype) if config.n_shared_experts else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] in the model's dtype to [T, D] float32."""
        ids, scales = route(x, self._gate, self._bias, self._routing)
        out = experts(x, ids, scales, self._gate_up, self._down)
        return out if self._shared is None else out.add_(self._shared(x))


def _stack_experts(
    config: ModelConfig,
    weights: WeightSource,
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, D] and down [E, D, I]; each expert is read straight into its place."""
    num, inner, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
    gate_up = torch.empty(num, 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.empty(num, hidden, inner, dtype=dtype, device=device)
    places = {}
    for expert in range(num):
        name = f"{prefix}experts.{expert}."
        places[f"{name}gate_proj.weight"] = gate_up[expert, :inner]
        places[f"{name}up_proj.weight"] = gate_up[expert, inner:]
        places[f"{name}down_proj.weight"] = down[expert]
    weights.take_all(places)
    return gate_up, down
