"""Loading is strict: every parameter once, everything else an error that names it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leyline.errors import ModelError
from leyline.model import weights as weights_module
from leyline.model.config import ModelConfig
from leyline.model.safetensors_file import TensorFile
from leyline.model.shards import INDEX_NAME, SINGLE_NAME
from leyline.model.transformer import Transformer
from leyline.model.weights import Checkpoint, load_model
from tests.model.folders import DATA, SHARDS, InMemory, Tensors, tensors, write
from tests.model.steps import Resident, make_cache, run_pieces

IDS = torch.tensor([3, 7, 1])
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def load(folder: Path, **options: Any) -> Transformer:
    return load_model(folder, progress=False, **options)


def answer(model: Transformer) -> Tensor:
    return run_pieces(model, make_cache(model, 3), Resident(torch.arange(3)), IDS, 3)


def expected(data: dict[str, Any] = DATA) -> Tensor:
    config = ModelConfig.from_dict(data)
    return answer(Transformer(config, InMemory(tensors(data)), dtype=torch.float32))


def refusal(folder: Path, *parts: str, **options: Any) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder, **options)
    assert all(part in caught.value.message for part in parts), caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_loads(tmp_path, sharded):
    model = load(write(tmp_path, tensors(), sharded=sharded))
    assert torch.equal(answer(model), expected())
    assert model.dtype == torch.float32


def test_a_parameter_one_percent_off_is_noticed(tmp_path):
    weights = tensors()
    weights["model.layers.1.self_attn.o_proj.weight"] *= 1.01
    assert (answer(load(write(tmp_path, weights))) - expected()).abs().max() > 1e-4


def stored_as(dtype: torch.dtype) -> Tensors:
    return {name: value.to(dtype) for name, value in tensors().items()}


@pytest.mark.parametrize(
    "stored, runs",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),  # which would overflow
        (torch.float64, torch.float32),
    ],
)
@pytest.mark.parametrize("claimed", ["float32", "bfloat16"])
def test_the_dtype_is_the_files_whatever_the_config_claims(tmp_path, stored, runs, claimed):
    folder = write(tmp_path, stored_as(stored), DATA | {"dtype": claimed})
    assert load(folder).dtype == runs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_that_is_asked_for_is_taken(tmp_path, dtype):
    assert load(write(tmp_path, tensors()), dtype=dtype).dtype == dtype


def test_norms_and_router_stay_float32_in_a_bf16_model(tmp_path):
    model = load(write(tmp_path, tensors()), dtype=torch.bfloat16)
    moe = model._layers[1]._mlp
    kept = (model._norm, model._layers[0]._input_norm, moe._gate, moe._bias)  # type: ignore[union-attr]
    assert all(tensor is not None and tensor.dtype == torch.float32 for tensor in kept)


def test_a_bias_stored_in_bf16_is_widened(tmp_path):
    weights = tensors()
    weights[BIAS] = weights[BIAS].bfloat16()
    config = ModelConfig.from_dict(DATA)
    with Checkpoint(write(tmp_path, weights), config, "cpu", progress=False) as checkpoint:
        assert torch.equal(checkpoint.take(BIAS, torch.float32), weights[BIAS].float())


def test_the_latent_eps_is_passed_on(tmp_path):
    model = load(write(tmp_path, tensors()), latent_norm_eps=0.5)
    assert model.config.latent_norm_eps == 0.5


# What may be in a checkpoint although the model does not use it.


MTP = {"model.layers.2.eh_proj.weight": torch.ones(2), "model.layers.2.enorm.weight": IDS}


def test_the_mtp_layer_is_skipped_by_its_number(tmp_path):
    assert torch.equal(answer(load(write(tmp_path, tensors() | MTP))), expected())


def test_as_many_mtp_layers_are_skipped_as_the_config_names(tmp_path):
    second = {"model.layers.3.eh_proj.weight": torch.ones(2)}
    data = DATA | {"num_nextn_predict_layers": 2}
    assert load(write(tmp_path / "two", tensors() | MTP | second, data))
    refusal(write(tmp_path / "one", tensors() | MTP | second), "unexpected", *second)


@pytest.mark.parametrize("present", [False, True])
def test_a_file_that_holds_only_the_mtp_layer_is_not_opened(tmp_path, present):
    folder = write(tmp_path, tensors(), sharded=True)
    rewrite_index(folder, lambda names: names.update(dict.fromkeys(MTP, "mtp-1-of-1.safetensors")))
    if present:
        (folder / "mtp-1-of-1.safetensors").write_bytes(b"garbage")
    assert torch.equal(answer(load(folder)), expected())


def test_stored_rope_frequencies_are_not_used(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert torch.equal(answer(load(write(tmp_path, tensors() | extra))), expected())


@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_head_is_the_embedding_whether_stored_or_not(tmp_path, stored):
    data = DATA | {"tie_word_embeddings": True}
    weights = tensors(data)
    copy = {"lm_head.weight": torch.full((30, 12), 9.0)} if stored else {}
    assert torch.equal(answer(load(write(tmp_path, weights | copy, data))), expected(data))


def test_stray_files_are_ignored_where_there_is_an_index(tmp_path):
    folder = write(tmp_path, tensors(), sharded=True)
    save_file({"model.norm.weight": torch.zeros(12)}, folder / SINGLE_NAME)
    (folder / "model-00003-of-00002.safetensors").write_bytes(b"garbage")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    assert torch.equal(answer(load(folder)), expected())


# What is missing, left over, or not what it says.


def dropped(*names: str) -> Tensors:
    return {name: value for name, value in tensors().items() if name not in names}


@pytest.mark.parametrize("sharded", [False, True])
def test_missing_parameters_are_all_named(tmp_path, sharded):
    names = ("model.layers.1.mlp.experts.2.up_proj.weight", "model.norm.weight")
    refusal(write(tmp_path, dropped(*names), sharded=sharded), "missing", *names)


def test_a_missing_head_is_not_taken_for_a_tied_one(tmp_path):
    refusal(write(tmp_path, dropped("lm_head.weight")), "missing lm_head.weight")


def test_unexpected_parameters_are_named(tmp_path):
    name = "model.layers.0.self_attn.q_proj.bias"
    refusal(write(tmp_path, tensors() | {name: torch.ones(14)}), "unexpected", name)


def test_missing_and_unexpected_come_in_one_message(tmp_path):
    weights = dropped("model.norm.weight") | {"model.norm.gamma": torch.ones(12)}
    refusal(write(tmp_path, weights), "missing model.norm.weight", "unexpected model.norm.gamma")


def test_a_long_list_is_cut(tmp_path):
    with pytest.raises(ModelError, match=r"and .* more") as caught:
        load(write(tmp_path, {"x": torch.ones(1)}))
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("shard", SHARDS)
def test_a_missing_shard_is_named(tmp_path, shard):
    folder = write(tmp_path, tensors(), sharded=True)
    (folder / shard).unlink()
    refusal(folder, shard, "not there")


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_an_index_that_names_a_tensor_no_file_holds_is_stale(tmp_path):
    folder = write(tmp_path, tensors(), sharded=True)
    rewrite_index(folder, lambda names: names.update({"ghost": SHARDS[0]}))
    refusal(folder, "stale", f"puts ghost into {SHARDS[0]}; it is in none")


def test_an_index_that_misses_a_tensor_is_stale(tmp_path):
    folder = write(tmp_path, tensors(), sharded=True)
    rewrite_index(folder, lambda names: names.pop("model.norm.weight"))
    refusal(folder, "stale", "puts model.norm.weight into no file", SHARDS[0])


def test_an_index_that_swaps_two_files_is_stale(tmp_path):
    folder = write(tmp_path, tensors(), sharded=True)
    rewrite_index(
        folder, lambda names: names.update({n: SHARDS[names[n] == SHARDS[0]] for n in names})
    )
    refusal(folder, "stale", "model.embed_tokens.weight")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = write(tmp_path, tensors(), sharded=True)
    twice = load_file(folder / SHARDS[1]) | {"model.norm.weight": torch.ones(12)}
    save_file(twice, folder / SHARDS[1])
    refusal(folder, "stale", "model.norm.weight", f"in {SHARDS[0]} and {SHARDS[1]}")


def test_an_index_that_names_only_files_that_are_gone_is_called_stale(tmp_path):
    folder = write(tmp_path, tensors(), sharded=True)
    for shard in SHARDS:
        (folder / shard).rename(folder / shard.replace("of-00002", "of-00003"))
    refusal(folder, "stale", *SHARDS, "not there")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin"]
)
def test_an_index_may_not_leave_the_folder(tmp_path, name):
    folder = write(tmp_path, tensors(), sharded=True)
    rewrite_index(folder, lambda names: names.update({"model.norm.weight": name}))
    refusal(folder, name)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    folder = write(tmp_path, tensors(), sharded=True)
    (folder / INDEX_NAME).write_text(content)
    refusal(folder, INDEX_NAME, "not a valid index")


def test_an_index_that_says_two_things_about_a_tensor_is_refused(tmp_path):
    folder = write(tmp_path, tensors(), sharded=True)
    path = folder / INDEX_NAME
    path.write_text(
        path.read_text()
        .replace("{", '{"model.norm.weight": "x", ', 2)
        .replace('{"model.norm.weight": "x", ', "{", 1)
    )
    refusal(folder, INDEX_NAME, "model.norm.weight is there twice")


@pytest.mark.parametrize("lost", ["1 byte", "a page", "half"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_that_was_cut_short_is_refused_before_anything_is_read(tmp_path, lost, sharded):
    big = DATA | {"vocab_size": 300}  # a file of several pages
    folder = write(tmp_path, tensors(big), big, sharded=sharded)
    path = folder / (SHARDS[1] if sharded else SINGLE_NAME)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate({"1 byte": size - 1, "a page": size - 4096, "half": size // 2}[lost])
    refusal(folder, path.name, "cut short", "missing, from the tensor")


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DATA))
    refusal(tmp_path, "neither", SINGLE_NAME)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refusal(tmp_path, "pytorch_model.bin", "never read")
    (tmp_path / SHARDS[0]).write_bytes(b"")
    refusal(tmp_path, SHARDS[0], "the index is missing")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    refusal(tmp_path / "nowhere", "no model folder")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_wrong_shape_is_refused(tmp_path, name):
    weights = tensors()
    weights[name] = weights[name][:-1].contiguous()
    refusal(write(tmp_path, weights), name, "shape")


@pytest.mark.parametrize("name", ["model.norm.weight", EXPERT, BIAS])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_a_dtype_that_is_no_float_is_refused(tmp_path, name, dtype):
    weights = tensors()
    weights[name] = weights[name].to(dtype)
    refusal(write(tmp_path, weights), name, SINGLE_NAME, "is stored as")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["lm_head.weight", EXPERT, "model.layers.1.mlp.gate.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_are_refused_if_asked(tmp_path, name, value, dtype):
    weights = tensors()
    weights[name].view(-1)[1] = value
    folder = write(tmp_path, weights)
    refusal(folder, name, SINGLE_NAME, "NaN or infinity", check_weights=True, dtype=dtype)
    assert load(folder, dtype=dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [BIAS, "model.norm.weight"])
def test_biases_and_norms_are_always_checked(tmp_path, name, value):
    weights = tensors()
    weights[name][1] = value
    refusal(write(tmp_path, weights), name, "NaN or infinity")


def test_infinities_that_cancel_are_found(tmp_path):
    weights = tensors()
    weights["lm_head.weight"][0, :2] = torch.tensor([float("inf"), float("-inf")])
    refusal(write(tmp_path, weights), "lm_head.weight", check_weights=True)


def test_finite_weights_pass_the_check(tmp_path):
    assert torch.equal(answer(load(write(tmp_path, tensors()), check_weights=True)), expected())


def test_a_parameter_is_handed_out_once(tmp_path):
    config = ModelConfig.from_dict(DATA)
    with Checkpoint(write(tmp_path, tensors()), config, "cpu", progress=False) as checkpoint:
        checkpoint.take("model.norm.weight", torch.float32)
        with pytest.raises(ModelError, match="taken twice"):
            checkpoint.take("model.norm.weight", torch.float32)
        with pytest.raises(ModelError, match="did not take"):
            checkpoint.require_all_taken()


def test_a_parameter_goes_to_its_place_or_not_at_all(tmp_path):
    config = ModelConfig.from_dict(DATA)
    place = torch.zeros(2, 7, 12)
    with Checkpoint(write(tmp_path, tensors()), config, "cpu", progress=False) as checkpoint:
        checkpoint.take_all({EXPERT: place[1]})
        with pytest.raises(ModelError, match="taken twice"):
            checkpoint.take_all({EXPERT: place[0]})
        with pytest.raises(ModelError, match="its place"):  # copying would repeat the row
            checkpoint.take_all({"model.norm.weight": place[0]})
    assert torch.equal(place[1], tensors()[EXPERT]) and not place[0].any()


def slow_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch, behind: bool) -> Checkpoint:
    """A checkpoint whose experts take a while."""
    fill = Checkpoint._fill

    def late(self: Checkpoint, name: str, out: Tensor) -> None:
        time.sleep(0.05)
        fill(self, name, out)

    monkeypatch.setattr(Checkpoint, "_fill", late)
    config = ModelConfig.from_dict(DATA)
    return Checkpoint(folder, config, "cpu", progress=False, behind=behind)


@pytest.mark.parametrize("behind", [False, True])
def test_places_are_filled_at_once_or_while_the_rest_is_taken(tmp_path, monkeypatch, behind):
    opened = slow_checkpoint(write(tmp_path, tensors()), monkeypatch, behind)
    place = torch.zeros(7, 12)
    with opened as checkpoint:
        checkpoint.take_all({EXPERT: place})
        assert place.any() == (not behind)
        with pytest.raises(ModelError, match="did not take"):
            checkpoint.require_all_taken()
        assert torch.equal(place, tensors()[EXPERT])


def test_an_error_ends_what_still_has_to_be_filled(tmp_path, monkeypatch):
    opened = slow_checkpoint(write(tmp_path, tensors()), monkeypatch, behind=True)
    names = [name for name in tensors() if ".experts." in name]
    places = {name: torch.zeros_like(tensors()[name]) for name in names}
    monkeypatch.setattr(weights_module, "BATCH", 1)
    with pytest.raises(KeyboardInterrupt), opened as checkpoint:
        checkpoint.take_all(places)
        raise KeyboardInterrupt
    assert not all(place.any() for place in places.values())
    assert not any(thread.name.startswith("loading") for thread in threading.enumerate())


@pytest.mark.parametrize("name", [EXPERT, "model.norm.weight", "lm_head.weight"])
def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path, monkeypatch, name):
    read = TensorFile.read_into

    def cut(self: TensorFile, wanted: str, place: Tensor) -> None:
        if wanted == name:
            os.truncate(tmp_path / self.name, self.entries[name].end - 1)
        read(self, wanted, place)

    monkeypatch.setattr(TensorFile, "read_into", cut)
    refusal(write(tmp_path, tensors()), SINGLE_NAME, "cut short while it was read")


def test_routed_experts_and_only_they_are_read_into_their_places(tmp_path):
    config = ModelConfig.from_dict(DATA)
    placed: list[str] = []

    class Recorder(Checkpoint):
        def take_all(self, places: Mapping[str, Tensor]) -> None:
            placed.extend(places)
            super().take_all(places)

    with Recorder(write(tmp_path, tensors()), config, "cpu", progress=False) as checkpoint:
        model = Transformer(config, checkpoint, dtype=torch.float32)
    assert sorted(placed) == sorted(name for name in tensors() if ".experts." in name)
    moe = model._layers[1]._mlp
    assert torch.equal(moe._gate_up[2, 7:], tensors()[EXPERT])  # type: ignore[union-attr]


def test_what_is_lent_is_overwritten_unless_it_is_large(tmp_path, monkeypatch):
    small, large = "model.layers.0.self_attn.o_proj.weight", "lm_head.weight"
    monkeypatch.setattr(weights_module, "KEPT_BYTES", tensors()[large].nbytes - 1)
    config = ModelConfig.from_dict(DATA)
    with Checkpoint(write(tmp_path, tensors()), config, "cpu", progress=False) as checkpoint:
        first = checkpoint.lend([small], torch.float32)
        assert torch.equal(first, tensors()[small])
        head = checkpoint.lend([large], torch.float32)
        again = checkpoint.lend([small.replace("layers.0", "layers.1")], torch.float32)
    assert torch.equal(head, tensors()[large]) and head.data_ptr() != first.data_ptr()
    assert torch.equal(first, again) and not torch.equal(first, tensors()[small])


def threads_of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as other:
        return other.submit(torch.get_num_threads).result()


def test_loading_leaves_torchs_threads_as_they_were(tmp_path, monkeypatch):
    seen: list[tuple[int, int]] = []
    check = weights_module._check_finite

    def spy(what: str, tensor: Tensor) -> None:
        seen.append((torch.get_num_threads(), threads_of_a_new_thread()))
        check(what, tensor)

    monkeypatch.setattr(weights_module, "_check_finite", spy)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        load(write(tmp_path / "good", tensors()))
        refusal(write(tmp_path / "bad", tensors() | {BIAS: torch.full((3,), torch.nan)}), BIAS)
        assert set(seen) == {(1, 2)}  # this thread alone, and nobody else is held back
        assert (torch.get_num_threads(), threads_of_a_new_thread()) == (2, 2)
    finally:
        torch.set_num_threads(before)


def test_a_loaded_model_does_not_live_off_the_file(tmp_path):
    folder = write(tmp_path, tensors())
    model = load(folder)
    path = folder / SINGLE_NAME
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(answer(model), expected())


@pytest.mark.parametrize("damage", [None, "model.norm.weight"])
def test_no_file_stays_open(tmp_path, damage):
    weights = {name: value for name, value in tensors().items() if name != damage}
    folder = write(tmp_path, weights, sharded=True)
    if damage is None:
        load(folder)
    else:
        refusal(folder, "missing", damage)
    process = Path("/proc/self")
    if process.is_dir():
        assert str(folder) not in (process / "maps").read_text()
        links = [os.readlink(link) for link in (process / "fd").iterdir() if link.is_symlink()]
        assert not any(str(folder) in link for link in links)


def test_the_progress_bar_counts_bytes(tmp_path, capsys):
    load_model(write(tmp_path, tensors()))
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown and "B/s" in shown
    load_model(tmp_path, progress=False)
    assert capsys.readouterr().err == ""
