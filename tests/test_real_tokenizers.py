"""The tokenizers of the four models, against other implementations of their vocabularies."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import regex
import splintr
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BpeTokenizer

from leyline.errors import ModelError
from leyline.tiktoken_vocabulary import PATTERN, TiktokenVocabulary
from leyline.tokenizer import Tokenizer
from leyline.tokenizer_files import special_tokens, stop_ids
from tests.real_tokenizers import (
    DATA,
    MOONLIGHT_SPECIAL,
    NUM_ROWS,
    moonlight_oracle,
    random_texts,
    real_folder,
    write,
)

MODELS = list(NUM_ROWS)
TEXTS = list(random_texts(10_000, seed=4))
SCRIPTS = [
    "日本語のテキスト、漢字とかな。",
    "한국어 문장이 깨지지 않아야 합니다.",
    "שלום עולם مرحبا بالعالم हिन्दी ภาษาไทย ქართული አማርኛ",
    "🙂👩‍👩‍👧‍👦🇫🇷 \U0001d518\U0001d52b \U0010ffff\x00\u200b\ufeff\ufffd e\u0301",
]
# llama.cpp's probe text (convert_hf_to_gguf.py), and what it knows of the ids.
PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis "
    "concatenated) ✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 "
    "កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български "  # noqa: RUF001
    "''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
FINGERPRINTS = {
    "glm-4.7-flash": "cdf5f35325780597efd76153d4d1c16778f766173908894c04afc20108536267",
    "deepseek-v2-lite": "049ecf7629871e3041641907f3de7c733e4dbfdc736f57d882ba0b0845599754",
    "joyai-llm-flash": "b4b8ca1f9769494fbd956ebc4c249de6131fb277a4a3345a7a92c7dd7a55808d",
    "moonlight-16b-a3b": "81212dc7cdb7e0c1074ca62c5aeab0d43c9f52b8a737be7b12a777c953027890",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = real_folder(name, tmp_path_factory.mktemp("real") / name)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def tokenizers(folders) -> Callable[[str], Tokenizer]:
    loaded: dict[str, Tokenizer] = {}

    def tokenizer(name: str) -> Tokenizer:
        if name not in loaded:
            loaded[name] = Tokenizer.load(folders(name))
        return loaded[name]

    return tokenizer


def fingerprint(ids: list[int]) -> str:
    return hashlib.sha256(str(ids).encode()).hexdigest()


# Whose they are -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "sha256"),
    [
        (
            "glm-4.7-flash",
            "tokenizer.json",
            "19e773648cb4e65de8660ea6365e10acca112d42a854923df93db4a6f333a82d",
        ),
        (
            "moonlight-16b-a3b",
            "tiktoken.model",
            "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103",
        ),
    ],
)
def test_the_files_are_those_of_the_hub(folders, name, file, sha256):
    data = (folders(name) / file).read_bytes()
    assert hashlib.sha256(data).hexdigest() == sha256
    assert hashlib.sha256(data[:-1]).hexdigest() != sha256


@pytest.mark.parametrize("name", MODELS)
def test_ids_have_the_fingerprint_that_llama_cpp_knows(tokenizers, name):
    tokenizer = tokenizers(name)
    ids = tokenizer.encode(PROBE, bos=True)
    assert fingerprint(ids) == FINGERPRINTS[name]
    assert (
        fingerprint(tokenizer.encode(PROBE.replace("\u200d", ""), bos=True)) != (FINGERPRINTS[name])
    )
    assert tokenizer.decode(ids) == PROBE


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("glm-4.7-flash", "tokenizer.json", 154_856),
        ("deepseek-v2-lite", "tokenizer.json", 100_002),
        ("joyai-llm-flash", "tokenizer.json", 128_815),
        ("moonlight-16b-a3b", "tiktoken.model", 163_840),
    ],
)
def test_every_id_below_the_size_has_a_text_and_a_row(tokenizers, name, kind, size):
    # So what is never sampled are exactly the ids from `vocab_size` on.
    tokenizer = tokenizers(name)
    assert (tokenizer.kind, tokenizer.vocab_size) == (kind, size)
    assert size <= NUM_ROWS[name]
    assert all(tokenizer.token_bytes(number, skip_special=False) for number in range(size))
    assert tokenizer.token_bytes(size, skip_special=False) == b""


# Ids and texts ------------------------------------------------------------------------------------


def oracle(name: str, folder: Path) -> Callable[[str], list[int]]:
    """Another implementation of the same vocabulary."""
    if name == "moonlight-16b-a3b":
        return moonlight_oracle().encode_ordinary
    return splintr.from_json(str(folder / "tokenizer.json")).encode


@pytest.mark.parametrize("name", MODELS)
def test_ten_thousand_random_texts_come_back_whole_and_in_a_stream(tokenizers, folders, name):
    tokenizer, other = tokenizers(name), oracle(name, folders(name))
    differing = 0
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == other(text)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) == text and stream.flush() == ""
        differing += "".join(tokenizer.decode([one]) for one in ids) != text
    assert differing > 1_000  # the twin: tokens decoded alone


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", SCRIPTS)
def test_a_stream_shows_at_every_split_just_the_whole_characters(tokenizers, name, text):
    tokenizer = tokenizers(name)
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        stream = tokenizer.stream()
        shown = "".join(map(stream.push, ids[:cut]))
        data = b"".join(map(tokenizer.token_bytes, ids[:cut]))
        assert shown == data.decode("utf-8", "ignore")
        assert shown + "".join(map(stream.push, ids[cut:])) + stream.flush() == text


@pytest.mark.parametrize("name", MODELS)
def test_a_stream_of_any_ids_equals_their_text(tokenizers, name):
    tokenizer = tokenizers(name)

    @given(st.lists(st.integers(0, NUM_ROWS[name] - 1), max_size=30), st.booleans())
    @settings(max_examples=150, deadline=None)
    def check(ids, skip_special):
        stream = tokenizer.stream(skip_special=skip_special)
        streamed = "".join(map(stream.push, ids)) + stream.flush()
        assert streamed == tokenizer.decode(ids, skip_special=skip_special)

    check()


@pytest.mark.parametrize("name", MODELS)
def test_texts_of_special_tokens_are_tokens_or_characters_as_asked(tokenizers, name):
    tokenizer = tokenizers(name)
    special = sorted(tokenizer._special_ids)
    texts = [tokenizer.token_bytes(one, skip_special=False).decode() for one in special]
    assert tokenizer.encode("".join(texts)) == special
    plain = tokenizer.encode_plain("x" + " ".join(texts))
    assert not set(plain) & set(special)
    assert tokenizer.decode(plain) == "x" + " ".join(texts)
    assert tokenizer.decode(special) == ""


def test_known_ids(tokenizers):
    glm = tokenizers("glm-4.7-flash")
    names = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
    numbers = [154820, 154822, 154824, 154826, 154827, 154828, 154829]
    assert glm.encode(names.replace(" ", "")) == numbers
    tags = "<think></think><tool_call></tool_call><arg_key></arg_value>/nothink"
    assert glm.encode(tags) == [154841, 154842, 154843, 154844, 154847, 154850, 154851]
    assert glm.decode(glm.encode(tags)) == tags  # they are not special: parsers see them
    assert not set(glm.encode_plain(tags)) & set(range(154820, 154856))
    moonlight = tokenizers("moonlight-16b-a3b")
    assert moonlight.encode("".join(MOONLIGHT_SPECIAL.values())) == list(MOONLIGHT_SPECIAL)
    assert moonlight.encode("<|reserved_token_163700|>") == [163_700]


def test_words_are_those_of_another_regex_engine(tokenizers):
    # Han classes and their intersection (&&), which Python's own `re` does not know.
    moonlight = tokenizers("moonlight-16b-a3b")
    merge = moonlight._vocabulary._encoding._encode_single_piece  # without a pattern
    for text in [*TEXTS[:500], "apple工作x", "Gute工作'S", "工作\n \n漢字 ", "ǅa'lL 1234567"]:
        words = regex.findall(f"(?:{PATTERN})", text, flags=regex.V1)
        assert "".join(words) == text
        assert [one for word in words for one in merge(word)] == moonlight.encode(text)


def test_han_characters_are_words_of_their_own():
    ranks = {bytes([byte]): byte for byte in range(256)}
    across = TiktokenVocabulary(
        ranks | {b"e" + "工".encode()[:1]: 256, b"e" + "é".encode()[:1]: 257}, {}, frozenset()
    )
    assert across.ids("e工") == list("e工".encode())
    assert across.ids("eé") == [257, "é".encode()[1]]  # the twin: other letters are not cut off


def test_no_text_gives_an_id_that_moonlight_has_no_row_for(tokenizers):
    # Its own Python file makes 258 special ids, two more than the embedding has rows.
    moonlight = tokenizers("moonlight-16b-a3b")
    for number in (163_840, 163_841):
        text = f"<|reserved_token_{number}|>"
        assert max(moonlight.encode(text)) < 163_584
        assert moonlight.decode(moonlight.encode(text)) == text
    assert moonlight.encode("<|reserved_token_163837|>") == [163_837]


def test_characters_that_are_listed_as_added_tokens_stay_characters():
    # DeepSeek's first vocabulary lists the 13 letters whose stand-ins no text can contain as bytes.
    with zipfile.ZipFile(DATA / "deepseek-llm-7b-base" / "tokenizer.json.zip") as archive:
        bpe = BpeTokenizer.from_str(archive.read("tokenizer.json").decode())
    tokenizer = Tokenizer(bpe)
    text = "schöne Grüße, 6÷2"
    ids = tokenizer.encode(text)
    assert 100_003 in ids
    assert tokenizer.decode(ids) == text
    assert bpe.decode(ids) != text  # the library reads such a token as a byte
    assert tokenizer.encode_plain(text) == ids
    bos = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    plain = tokenizer.encode_plain(text + bos)
    assert plain[: len(ids)] == ids and 100_000 not in plain
    assert tokenizer.encode(text + bos) == [*ids, 100_000]


@pytest.mark.parametrize("name", MODELS)
def test_very_long_texts_take_seconds(tokenizers, name):
    tokenizer = tokenizers(name)
    start = time.perf_counter()
    for text in (" " * 60_000, "a" * 60_000, "漢" * 60_000, "1" * 60_000, "!\n" * 30_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.perf_counter() - start < 20


def test_very_long_runs_are_cut_where_moonlights_own_code_cuts(tokenizers):
    moonlight = tokenizers("moonlight-16b-a3b")
    for first, rest in ((" ", 25_000), ("ab", 12_500), ("漢", 25_000)):
        run, text = first * rest, first * rest + first * 100
        cut = moonlight.encode(run) + moonlight.encode(first * 100)
        assert moonlight.encode(text) == cut
    words = "ab " * 150_000  # 450,000 characters, none of them in a long run
    assert moonlight.encode(words) == (
        moonlight.encode(words[:400_000]) + moonlight.encode(words[400_000:])
    )


# Ends and beginnings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("glm-4.7-flash", {154_820, 154_827, 154_829}),
        ("deepseek-v2-lite", {100_001}),
        ("joyai-llm-flash", {1}),
        ("moonlight-16b-a3b", {163_586, 163_585}),  # the latter ends a text, not a turn
    ],
)
def test_replies_end_where_the_model_ends_them(tokenizers, folders, tmp_path, name, ends):
    tokenizer = tokenizers(name)
    assert tokenizer.stop_ids == ends
    # A copy that lost its generation_config.json: the template's own turn ends serve.
    config = json.loads((folders(name) / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = special_tokens(tmp_path, config)
    id_of = tokenizer._vocabulary.id_of
    assert stop_ids(tmp_path, tokens, id_of, tokenizer.template) == ends
    has_turn_ends = name in ("glm-4.7-flash", "moonlight-16b-a3b")
    assert (stop_ids(tmp_path, tokens, id_of, None) != ends) == has_turn_ends


@pytest.mark.parametrize(
    ("name", "bos_id", "starts"),
    [
        ("glm-4.7-flash", None, [154_822, 154_824]),
        ("deepseek-v2-lite", 100_000, [100_000]),
        ("moonlight-16b-a3b", None, [163_594]),
    ],
)
def test_there_is_one_bos_in_every_path_or_none_at_all(tokenizers, name, bos_id, starts):
    tokenizer = tokenizers(name)
    chat = tokenizer.encode(tokenizer.render([{"role": "user", "content": "Hi"}]))
    assert tokenizer.bos_id == bos_id
    assert chat[: len(starts)] == starts
    plain = tokenizer.encode("Hi", bos=True)
    assert plain == [bos_id] * (bos_id is not None) + tokenizer.encode("Hi")
    if bos_id is not None:
        assert chat.count(bos_id) == 1
        text = tokenizer.token_bytes(bos_id, skip_special=False).decode() + "Hi"
        assert tokenizer.encode(text, bos=True) == tokenizer.encode(text) == plain


# Files of other models ----------------------------------------------------------------------------


def test_a_vocabulary_larger_than_the_model_is_refused(folders, tmp_path):
    for name in ("deepseek-v2-lite", "moonlight-16b-a3b"):
        folder = tmp_path / name
        folder.mkdir()
        for file in folders(name).iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file)
        write(folder, "config.json", {"vocab_size": 99_999})
        with pytest.raises(ModelError, match="different models"):
            Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens_decoder": None}, "needs the names of its special tokens"),
        ({"added_tokens_decoder": {"x": {"content": "[BOS]"}}}, "an object with a content"),
        ({"added_tokens_decoder": {"163584": "[BOS]"}}, "an object with a content"),
        ({"added_tokens_decoder": {"163584": {"content": ""}}}, "an object with a content"),
        (
            {
                "added_tokens_decoder": {
                    "163584": {"content": "[BOS]"},
                    "163585": {"content": "[BOS]"},
                }
            },
            "names a token twice",
        ),
    ],
)
def test_special_tokens_without_proper_names_are_refused(folders, tmp_path, change, message):
    source = folders("moonlight-16b-a3b")
    (tmp_path / "tiktoken.model").symlink_to(source / "tiktoken.model")
    config = json.loads((source / "tokenizer_config.json").read_text())
    write(tmp_path, "tokenizer_config.json", config | change)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(tmp_path)
