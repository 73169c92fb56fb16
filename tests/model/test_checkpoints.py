"""The four families by hub id, in the form of their repositories, against `transformers`.

Errors are relative to the root mean square of the oracle's value; float32 passes agree to 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leyline.hub import find_model
from leyline.model.config import ModelConfig
from leyline.model.presets import HUB_IDS, preset
from leyline.model.shards import INDEX_NAME, required_files
from leyline.model.transformer import Transformer
from leyline.model.weights import Checkpoint, load_model
from tests.checkpoints import FAMILIES, MTP_FILE, NEVER_READ, write_checkpoint
from tests.hub_stand_in import HubStandIn, hub_stand_in, point_to
from tests.model.oracle import Answer, Oracle
from tests.model.steps import OnePercentOff, answer, greedy
from tests.tiny_models import VOCAB_SIZE

TOLERANCE = 1e-4
IDS = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3))
SAME_AS_REAL = (
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "num_attention_heads",
    "num_experts_per_tok",
    "n_shared_experts",
    "scoring_func",
    "topk_method",
    "norm_topk_prob",
    "routed_scaling_factor",
    "rope_theta",
    "yarn",
    "rms_norm_eps",
    "max_position_embeddings",
    "num_nextn_predict_layers",
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracle(family: str, tmp_path_factory) -> Oracle:
    return write_checkpoint(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def hub(family: str, oracle: Oracle, tmp_path_factory) -> Iterator[HubStandIn]:
    with hub_stand_in() as stand_in, pytest.MonkeyPatch.context() as patch:
        point_to(stand_in.url, tmp_path_factory.mktemp("hub"), patch)
        stand_in.publish(HUB_IDS[family], oracle.folder)
        yield stand_in


@pytest.fixture(scope="module")
def folder(family: str, hub: HubStandIn, tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    return find_model(HUB_IDS[family], "", str(cache), progress=False)


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load_model(folder, progress=False)


@pytest.fixture(scope="module")
def want(oracle: Oracle) -> Answer:
    return oracle.answer(IDS, torch.arange(len(IDS)))


def test_the_geometry_and_the_router_are_the_real_ones(family, folder):
    small, real = ModelConfig.load(folder), preset(family)
    assert [getattr(small, n) for n in SAME_AS_REAL] == [getattr(real, n) for n in SAME_AS_REAL]
    assert len(required_files(folder, small)) > 1 and (folder / INDEX_NAME).is_file()


def test_only_what_an_engine_reads_was_fetched(hub, folder):
    fetched = {path.name for path in folder.iterdir()}
    assert fetched == set(hub.asked("GET"))
    assert not fetched & {*NEVER_READ, MTP_FILE}
    assert hub.lookups() == 1


@pytest.mark.parametrize("size", [40, 7, 1])
def test_rows_layers_and_logits_are_the_oracles(model, want, size):
    assert model.dtype == torch.float32
    assert answer(model, IDS, size).worst_error(want) <= TOLERANCE


def test_it_generates_what_the_oracle_generates(oracle, model):
    assert greedy(model, IDS[:12], 16) == oracle.greedy(IDS[:12], 16)


@pytest.mark.parametrize("kind", ["q_", "kv_b_proj", "mlp.gate.", "shared_experts.up", "norm"])
def test_one_percent_on_a_parameter_is_noticed(folder, want, kind):
    config = ModelConfig.load(folder)
    with Checkpoint(folder, config, "cpu", progress=False) as checkpoint:
        model = Transformer(config, OnePercentOff(checkpoint, kind), dtype=torch.float32)
    assert answer(model, IDS, 40).worst_error(want) > TOLERANCE


class Swapped:
    """A checkpoint in which the parts of every head of `kv_b_proj` change places."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self._checkpoint = checkpoint
        self._config = config

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        value = self._checkpoint.take(name, dtype)
        if "kv_b_proj" not in name:
            return value
        heads = value.unflatten(0, (self._config.num_attention_heads, -1))
        return heads.roll(self._config.v_head_dim, dims=1).flatten(0, 1)

    def lend(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        return self._checkpoint.lend(names, dtype)

    def take_all(self, places: Mapping[str, Tensor]) -> None:
        self._checkpoint.take_all(places)


def test_heads_with_their_parts_swapped_are_noticed(folder, want):
    config = ModelConfig.load(folder)
    with Checkpoint(folder, config, "cpu", progress=False) as checkpoint:
        model = Transformer(config, Swapped(checkpoint, config), dtype=torch.float32)
    assert answer(model, IDS, 40).worst_error(want) > 0.1
