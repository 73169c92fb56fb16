"""What is told of a model before it is loaded: the real sizes, and what the engine then does."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from leyline import EngineConfig, doctor, parts
from leyline.doctor import Diagnosis, diagnose
from leyline.embedded import embedded_folder
from leyline.errors import ConfigError, ModelError
from leyline.model.presets import HUB_IDS
from leyline.model.safetensors_file import TensorFile
from leyline.model.weights import load_model
from tests.hub_stand_in import hub_stand_in, point_to
from tests.llama_models import llama_model
from tests.test_embedded import write_tiny_gguf

Folder = Callable[[str], Path]

GB = 1e9
USAGE = namedtuple("USAGE", "total used free")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine of which everything that matters is known: 200 GB of memory, 1 TB of disk."""

    def set_to(memory: float = 200 * GB, disk: float = 1000 * GB, bf16: bool = True) -> None:
        monkeypatch.setattr(parts, "memory_bytes", lambda device: int(memory))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE(0, 0, int(disk)))
        monkeypatch.setattr(doctor, "_multiplies_bf16", lambda: bf16)

    set_to()
    return set_to


def look(folder: Path, **options: Any) -> Diagnosis:
    return diagnose(EngineConfig(model=str(folder), device="cpu", progress=False, **options))


def look_at_preset(name: str, **options: Any) -> Diagnosis:
    return diagnose(EngineConfig(device="cpu", **options), name)


def copied(folder: Path, copy: Path, *left_out: str) -> Path:
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*left_out))
    return copy


def edited(folder: Path, **keys: Any) -> None:
    """Change keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


# The real sizes -------------------------------------------------------------------------------

# Total and active parameters in billions, cache bytes a token with a bf16 and an fp32 band: the
# first three from the published configs (models.md, section 1), the last 2 bytes a latent element
# and 4 a band element: layers * (512 * 2 + 64 * 4).
SIZES = {
    "deepseek-v2-lite": (15.706, 2.45, 31_104, 34_560),
    "moonlight-16b-a3b": (15.960, 2.58, 31_104, 34_560),
    "glm-4.7-flash": (29.943, 3.58, 54_144, 60_160),
    "joyai-llm-flash": (48.943, 3.04, 46_080, 51_200),
}


def test_every_preset_has_its_sizes_here():
    assert SIZES.keys() == HUB_IDS.keys()


@pytest.mark.parametrize("name", SIZES)
def test_the_real_sizes(name):
    total, active, bf16, fp32 = SIZES[name]
    found = look_at_preset(name)
    assert round(found.parameters["total"] / 1e9, 3) == total
    assert round(found.parameters["active"] / 1e9, 2) == active
    assert found.cache["bytes_per_token"] == {"bfloat16": bf16, "float32": fp32}
    assert found.weights["bytes"] == 2 * found.parameters["total"]
    assert found.device["name"].startswith("cpu")
    text = str(found)
    for said in (HUB_IDS[name], f"{total:.3f} B", f"{bf16:,} bytes", f"{fp32:,} with", "told once"):
        assert said in text


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers"])
def test_another_size_is_another_figure(key, monkeypatch):
    data = doctor.preset_data("deepseek-v2-lite")
    monkeypatch.setattr(doctor, "preset_data", lambda name: {**data, key: data[key] + 2})
    found = look_at_preset("deepseek-v2-lite")
    assert round(found.parameters["total"] / 1e9, 3) != 15.706
    assert found.cache["bytes_per_token"]["bfloat16"] != 31_104


def test_in_fp32_everything_is_larger():
    found = look_at_preset("deepseek-v2-lite", dtype="float32")
    assert found.weights["bytes"] == 4 * found.parameters["total"]
    assert found.cache["bytes_per_token"] == {"bfloat16": 27 * 2176, "float32": 27 * 2304}


def test_what_fits_is_what_the_weights_leave(machine):
    machine(memory=40 * GB)
    found = look_at_preset("deepseek-v2-lite")
    left = int(40 * GB) - found.weights["bytes"]
    assert found.cache["tokens_that_fit"] == left // 34_560 == 248_467
    assert found.cache["tokens"] == left // 4 // 34_560
    narrow = look_at_preset("deepseek-v2-lite", kv_rope_dtype="bfloat16")
    assert narrow.cache["tokens_that_fit"] == left // 31_104
    assert look_at_preset("deepseek-v2-lite", kv_cache_tokens=77).cache["tokens"] == 77


# What the engine then does --------------------------------------------------------------------


@pytest.mark.parametrize("family", ["v2_yarn", "v3", "glm"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_engine_does_what_was_said(family, dtype, tiny_folder):
    folder = tiny_folder(family)
    config = EngineConfig(model=str(folder), device="cpu", dtype=dtype, progress=False)
    said = diagnose(config)
    asked = None if dtype == "auto" else torch.bfloat16
    model = load_model(folder, asked, progress=False)
    cache = parts._cache(config, model, torch.device("cpu"))
    assert said.weights["dtype"] == str(model.dtype).removeprefix("torch.")
    assert said.cache["tokens"] == cache.ckv.shape[1]
    row = cache.ckv[:, 0].nbytes + cache.kpe[:, 0].nbytes
    assert said.cache["bytes_per_token"]["float32"] == row
    assert said.cache["bytes_per_token"]["bfloat16"] != row
    assert said.weights["is_complete"] and said.weights["stored_bytes"] > 4 * 20_000
    assert said.text["stop_ids"] == [2] and said.text["has_template"]
    assert said.warnings == []


def test_no_weight_is_read(tiny_folder, monkeypatch):
    monkeypatch.setattr(TensorFile, "view", None)
    assert look(tiny_folder("v3")).parameters["total"] > 0


def test_config_json_alone_is_enough(tiny_folder, tmp_path):
    (tmp_path / "bare").mkdir()
    shutil.copy(tiny_folder("v3") / "config.json", tmp_path / "bare")
    found, whole = look(tmp_path / "bare"), look(tiny_folder("v3"))
    assert found.parameters == whole.parameters and found.shape == whole.shape
    assert found.cache["bytes_per_token"] == whole.cache["bytes_per_token"]
    assert not found.weights["is_complete"] and found.weights["stored_bytes"] is None
    assert len(found.warnings) == 2
    assert "files of the weights" in found.warnings[0] and "tokenizer" in found.warnings[1]
    assert "cannot be read" in str(found)


def test_the_json_is_the_same(tiny_folder):
    found = look(tiny_folder("glm"))
    assert json.loads(found.to_json()) == asdict(found)


def test_the_embedded_model_is_told_before_and_after_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("LEYLINE_HOME", str(tmp_path))
    before = diagnose(EngineConfig(device="cpu"))
    assert before.model == parts.EMBEDDED_NAME and "Llama family" in before.family
    assert before.cache["bytes_per_token"] == {"bfloat16": 23_040, "float32": 34_560}
    assert before.shape["window"] == 8192 and not before.text["known"]
    from leyline import llama_as_mla

    source = llama_as_mla.GgufModel(write_tiny_gguf(tmp_path / "tiny.gguf"))
    folder = embedded_folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(llama_as_mla.mla_config(source, "bfloat16")))
    after = diagnose(EngineConfig(device="cpu"))
    assert after.shape["kv_lora_rank"] == 16 != before.shape["kv_lora_rank"]


def test_a_gpu_is_told_as_one(monkeypatch):
    monkeypatch.setattr(parts, "device_of", lambda name: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    found = look_at_preset("glm-4.7-flash")
    assert found.device["name"] == "cuda:0: H200" and found.device["type"] == "cuda"
    assert found.kernels["move"] == "triton" and "oneDNN" not in found.kernels["linear"]
    assert found.warnings == []
    cpu = doctor._kernels(
        doctor.ModelConfig.from_dict(doctor.preset_data("glm-4.7-flash")),
        torch.device("cpu"),
        torch.bfloat16,
    )
    assert cpu["move"] == "torch" and "oneDNN" in cpu["linear"]


def test_the_border_between_the_forms_is_the_engines():
    shape = doctor.ModelConfig.from_dict(doctor.preset_data("deepseek-v2-lite"))
    border = doctor._absorbed_queries(shape)
    # Per pair 2C + R against N + R + V, and C (N + V) for every query or for every key.
    absorbed = lambda n, keys: n * keys * 1088 + n * 512 * 256  # noqa: E731
    explicit = lambda n, keys: n * keys * 320 + keys * 512 * 256  # noqa: E731
    assert absorbed(border, 4096 + border) <= explicit(border, 4096 + border)
    assert absorbed(border + 1, 4097 + border) > explicit(border + 1, 4097 + border)


# By hub id ------------------------------------------------------------------------------------


def test_of_a_hub_repository_only_small_files_are_fetched(
    tiny_folder, tmp_path, monkeypatch, machine
):
    with hub_stand_in() as hub:
        point_to(hub.url, tmp_path, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.publish("ada/tiny", tiny_folder("v3"))
        config = EngineConfig(model="ada/tiny", device="cpu", progress=False)
        found = diagnose(config)
        assert found.model == "ada/tiny" and found.text["stop_ids"] == [2]
        assert "config.json" in hub.asked()
        assert not any(name.endswith(".safetensors") for name in hub.asked())
        assert not found.weights["is_complete"]
        assert found.warnings == []
        machine(disk=1000)
        assert "of disk" in diagnose(config).warnings[0]
        with pytest.raises(ModelError, match="ada/nothing"):
            diagnose(EngineConfig(model="ada/nothing", progress=False))


def test_the_download_is_what_the_engine_fetches(tiny_folder, tmp_path, monkeypatch, machine):
    """An MTP layer in a file of its own is in the index's sum, and is not fetched."""
    folder = copied(tiny_folder("v3"), tmp_path / "repository")
    for name in folder.glob("*.safetensors*"):
        name.unlink()
    shards = {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}
    layers = doctor.ModelConfig.load(folder).num_hidden_layers
    mtp = {f"model.layers.{layers}.eh_proj.weight": "mtp.safetensors"}
    index = {"metadata": {"total_size": 6_234_000}, "weight_map": shards | mtp}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, count in (("a", 1000), ("b", 234), ("mtp", 5000), ("stray", 7000)):
        (folder / f"{name}.safetensors").write_bytes(bytes(count * 1000))
    with hub_stand_in() as hub:
        point_to(hub.url, tmp_path, monkeypatch)
        hub.publish("ada/tiny", folder)
        config = EngineConfig(
            model="ada/tiny", device="cpu", progress=False, download_dir=str(tmp_path / "cache")
        )
        found = diagnose(config)
        assert found.weights["stored_bytes"] == 1_234_000 and "1.23 MB to download" in str(found)
        machine(disk=1_300_000)
        assert diagnose(config).warnings == []
        machine(disk=1_200_000)
        assert "needs 1.23 MB of disk" in diagnose(config).warnings[0]
        asked = len(hub.requests)
        for listing in (tmp_path / "cache").glob("*/trees/*"):
            listing.unlink()
        monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert diagnose(config).weights["stored_bytes"] is None  # nobody noted the sizes
        assert len(hub.requests) == asked


# Warnings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "options", "said"),
    [
        ({"memory": 20 * GB}, {}, "do not fit: 31.41 GB are needed, 20.00 GB"),
        ({"memory": 33 * GB}, {}, "less than the window of 163,840"),
        ({"memory": 33 * GB}, {"kv_cache_tokens": 50_000}, "50,000 tokens are asked for, 45,921"),
        ({}, {}, "at most 4.1 tokens a second"),
        ({"bf16": False}, {}, "no bfloat16 instructions"),
        ({"disk": 30 * GB}, {}, "needs 31.41 GB of disk, and 30.00 GB are free"),
        ({}, {"kv_rope_dtype": "bfloat16"}, "drifts"),
    ],
)
def test_what_a_user_should_know_is_said(facts, options, said, machine):
    machine(**facts)
    found = look_at_preset("deepseek-v2-lite", **options)
    assert any(said in warning for warning in found.warnings)
    assert said in str(found)


def test_and_only_then(machine, tiny_folder):
    found = look(tiny_folder("v3"))
    assert found.warnings == [] and "No warnings." in str(found)
    machine(memory=33 * GB)
    assert not any("do not fit" in w for w in look_at_preset("deepseek-v2-lite").warnings)
    machine(bf16=False)
    wide = look_at_preset("deepseek-v2-lite", dtype="float32")
    assert not any("instructions" in warning for warning in wide.warnings)


def test_a_folder_without_template_or_stop_ids(tiny_folder, tmp_path):
    left_out = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")
    folder = copied(tiny_folder("v3"), tmp_path / "bare", *left_out)
    edited(folder, eos_token_id=None)
    found = look(folder)
    assert "chat template" in found.warnings[0] and "ends a reply" in found.warnings[1]
    assert "no chat template" in str(found)


def test_fp8_weights_grow_in_memory(tiny_folder, tmp_path):
    folder = copied(tiny_folder("v3"), tmp_path / "fp8", "*.safetensors")
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    edited(folder, quantization_config=scheme)
    assert any("twice as large" in warning for warning in look(folder).warnings)


# Refused --------------------------------------------------------------------------------------


def test_models_that_cannot_be_served_are_refused(tiny_folder, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        look(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        look(tmp_path / "empty")
    folder = copied(tiny_folder("v3"), tmp_path / "odd")
    edited(folder, qk_rope_head_dim=7)
    with pytest.raises(ModelError, match="qk_rope_head_dim"):
        look(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="JSON"):
        look(folder)
    with pytest.raises(ModelError, match="presets are deepseek-v2-lite"):
        look_at_preset("deepseek-v9")


def test_a_llama_is_sent_to_convert_if_that_would_help(tmp_path):
    llama_model("llama-gqa", tmp_path / "llama")
    with pytest.raises(ModelError, match=r"leyline convert.*20 elements"):
        look(tmp_path / "llama")
    edited(tmp_path / "llama", mlp_bias=True)
    with pytest.raises(ModelError, match="mlp_bias"):
        look(tmp_path / "llama")


def test_options_that_do_not_fit_are_refused(tiny_folder):
    with pytest.raises(ConfigError, match="max_model_len"):
        look(tiny_folder("v3"), max_model_len=10_000)
    with pytest.raises(ConfigError, match="device"):
        diagnose(EngineConfig(device="abacus"), "deepseek-v2-lite")


def test_a_cache_that_just_fits_is_no_matter(machine):
    machine(memory=33 * GB)
    fitting = look_at_preset("deepseek-v2-lite").cache["tokens_that_fit"]
    just, beyond = (
        look_at_preset("deepseek-v2-lite", kv_cache_tokens=n) for n in (fitting, fitting + 1)
    )
    assert not any("does not fit" in warning for warning in just.warnings)
    assert any("does not fit" in warning for warning in beyond.warnings)


def test_what_has_no_revisions_is_refused_one(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LEYLINE_HOME", str(tmp_path))
    for config, preset in (
        (EngineConfig(revision="v1"), ""),
        (EngineConfig(revision="v1"), "glm-4.7-flash"),
        (EngineConfig(revision="v1", model=str(tiny_folder("v3"))), ""),
    ):
        with pytest.raises(ConfigError, match="only a model named by its hub id") as caught:
            diagnose(config, preset)
        assert caught.value.param == "revision"


def test_a_llama_that_convert_would_refuse_is_not_sent_there(tmp_path):
    folder = tmp_path / "llama"
    llama_model("llama-gqa", folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(
        json.dumps({**spec, "decoder": {"type": "ByteFallback"}})
    )
    with pytest.raises(ModelError, match="SentencePiece"):
        look(folder)


@pytest.mark.parametrize(
    "index",
    ['{"weight_map": {}}', '{"weight_map": {}, "metadata": {"total_size": Infinity}}'],
)
def test_an_index_that_says_nothing_is_no_crash(index, tiny_folder, tmp_path):
    folder = copied(tiny_folder("v3"), tmp_path / "m", "*.safetensors", "*.index.json")
    (folder / "model.safetensors.index.json").write_text(index)
    diagnosis = look(folder)
    assert not diagnosis.weights["is_complete"]
    assert diagnosis.weights["stored_bytes"] is None


REAL_MEMORY = parts.memory_bytes


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 4096 * 1024), ("3000000", 2000000), ("500", 0), (None, 4096 * 1024)]
)
def test_the_memory_of_a_cpu_is_what_system_and_cgroup_leave(limit, free, tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4096 kB\n")
    monkeypatch.setattr(parts, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(parts, "CGROUP", tmp_path)
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("1000000\n")
    assert REAL_MEMORY(torch.device("cpu")) == free
    monkeypatch.setattr(parts, "MEMINFO", tmp_path / "none")
    assert REAL_MEMORY(torch.device("cpu")) >= 0


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        ("{{ messages }}", "prompted", "none"),
        ("{{ tools }}<tool_call><arg_key><arg_value><think></think>", "glm47", "glm45"),
        ("{{ tools }}<tool_call><function=<parameter=", "qwen3_coder", "none"),
    ],
)
def test_the_parsers_are_those_of_the_template(template, tool, reasoning, tiny_folder, tmp_path):
    folder = copied(tiny_folder("v3"), tmp_path / "model", "chat_template.jinja")
    (folder / "chat_template.jinja").write_text(template)
    assert look(folder).parsers == {"tool_calls": tool, "reasoning": reasoning}


def test_the_embedded_model_is_not_served_in_a_revision():
    with pytest.raises(ConfigError, match="revision"):
        parts.model_folder(EngineConfig(revision="main"))
