"""Frequencies, amplitude and scale: known values, both spellings of YaRN's roles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from leyline.model.config import ModelConfig
from leyline.model.rope import Rope

SHAPE = {
    "model_type": "deepseek_v2",
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 4,
    "intermediate_size": 4,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}


def rope(**changes: Any) -> Rope:
    return Rope(ModelConfig.from_dict(SHAPE | changes))


# The check values of the published DeepSeek-V2-Lite config.
LITE = {
    10: 0.0562341,
    11: 0.0390069,
    15: 0.00833451,
    16: 0.0055,
    20: 7.90569e-4,
    22: 1.77828e-4,
    23: 3.33380e-5,
    31: 3.33380e-6,
}


@pytest.mark.parametrize("pair", LITE)
def test_yarn_blends_the_frequencies(pair):
    value = float(rope(rope_scaling=YARN).inv_freq[pair])
    assert value == pytest.approx(LITE[pair], rel=1e-5)
    assert value * 1.01 != pytest.approx(LITE[pair], rel=1e-5)


def test_yarn_of_the_lite_model_has_amplitude_1_and_a_larger_softmax_scale():
    lite = rope(rope_scaling=YARN)
    assert lite.amplitude == 1.0
    assert lite.softmax_scale == pytest.approx(0.1147214, rel=1e-6)


def test_the_two_mscales_have_two_roles():
    """The ratio scales cos and sin; mscale_all_dim alone scales the softmax."""
    mixed = rope(rope_scaling=YARN | {"mscale": 1.0})
    m = 0.1 * math.log(40)
    assert mixed.amplitude == pytest.approx((m + 1) / (0.707 * m + 1))
    assert mixed.softmax_scale == pytest.approx(192**-0.5 * (0.707 * m + 1) ** 2)
    cos, sin = mixed.cos_sin(torch.tensor([5]))
    torch.testing.assert_close(cos**2 + sin**2, torch.full((1, 32), mixed.amplitude**2))


def test_without_mscale_all_dim_the_softmax_scale_is_plain():
    plain = rope(rope_scaling={k: v for k, v in YARN.items() if not k.startswith("mscale")})
    assert plain.softmax_scale == 192**-0.5
    assert plain.amplitude == pytest.approx(0.1 * math.log(40) + 1)


def test_an_explicit_attention_factor_is_the_amplitude():
    assert rope(rope_scaling=YARN | {"attention_factor": 1.25}).amplitude == 1.25


def test_an_untruncated_ramp_is_as_in_transformers():
    from transformers import DeepseekV2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from tests.model.oracle import quiet

    block = YARN | {"truncate": False, "rope_type": "yarn", "rope_theta": 10000.0}
    with quiet():
        config = DeepseekV2Config(
            qk_rope_head_dim=64, max_position_embeddings=163840, rope_parameters=block
        )
        want, _ = ROPE_INIT_FUNCTIONS["yarn"](config)
    got = rope(rope_parameters=block).inv_freq
    torch.testing.assert_close(got.float(), want, rtol=1e-5, atol=0)


def test_plain_rope():
    plain = rope()
    assert plain.amplitude == 1.0
    assert plain.softmax_scale == 192**-0.5
    want = [10000.0 ** (-i / 32) for i in range(32)]
    assert plain.inv_freq.tolist() == pytest.approx(want, rel=1e-15)
    assert plain.inv_freq.dtype == torch.float64


def test_a_list_of_frequencies_replaces_theta():
    values = [1 / (i + 1) for i in range(32)]
    assert rope(rope_inv_freq=values).inv_freq.tolist() == values


@pytest.mark.parametrize("position", [0, 1, 4097, 163_839, 10_000_000])
def test_angles_are_formed_in_float64(position):
    cos, sin = rope().cos_sin(torch.tensor([position]))
    for i in (0, 1, 7, 31):
        angle = position * 10000.0 ** (-i / 32)
        assert float(cos[0, i]) == pytest.approx(math.cos(angle), abs=1e-7)
        assert float(sin[0, i]) == pytest.approx(math.sin(angle), abs=1e-7)
    assert cos.dtype == sin.dtype == torch.float32
