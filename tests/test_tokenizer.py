import base64
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BpeTokenizer

from leyline import bpe_vocabulary
from leyline.errors import InvalidRequestError, ModelError
from leyline.tokenizer import BYTE_OF, Tokenizer, check_text
from tests.embedded_fixtures import embedded_model
from tests.tiny_models import byte_tokenizer

BAR_TOKEN = "<\uff5cé\uff5c>"  # DeepSeek writes its special tokens with full-width bars
EMBEDDED = Tokenizer.load(embedded_model())
LIBRARY = BpeTokenizer.from_file(str(embedded_model() / "tokenizer.json"))
SPEC = json.loads((embedded_model() / "tokenizer.json").read_text(encoding="utf-8"))
SCRIPTS = [
    "Hello, world!  Two  spaces\n\n\ttabs and trailing ",
    "naïve façade – “quotes” … 3½ 2024-11-30 12,345.67",
    "日本語のテキスト、漢字とかな。",
    "한국어 문장이 깨지지 않아야 합니다.",
    "Привет, мир! Γειά σου Κόσμε",  # noqa: RUF001
    "שלום עולם مرحبا بالعالم हिन्दी ภาษาไทย",
    "🙂👩‍👩‍👧‍👦🇫🇷 \U0001d518\U0001d52b \U0010ffff\x00\u200b\ufeff\ufffd",
    "def f(x):\n    return x[1:] + '…'  # ok\r\n",
]
# SmolLM2's vocabulary lacks six control characters, and the first byte of planes 4 to 11.
any_text = st.text(
    st.characters(
        max_codepoint=0x3FFFF,
        exclude_categories=["Cs"],
        exclude_characters="\x04\x06\x13\x14\x16\x1d",
    )
)
any_ids = st.lists(st.integers(0, EMBEDDED.vocab_size + 3), max_size=40)
# Tokens of a byte or two: almost every split falls inside a character.
short_ids = st.lists(
    st.sampled_from([i for t, i in SPEC["model"]["vocab"].items() if len(t) <= 2]), max_size=40
)


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special=skip_special)
    return [*map(stream.push, ids), stream.flush()]


def small_folder(folder: Path, edit: Callable[[dict[str, Any]], object] | None = None) -> Path:
    """A model folder with a tokenizer of single bytes and the added tokens <s>, </s> and <t>."""
    vocab = {character: byte for character, byte in BYTE_OF.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [("<s>", True), ("</s>", True), ("<t>", False), (BAR_TOKEN, True)]
    spec = {
        **SPEC,
        "added_tokens": [
            {"id": 256 + i, "content": text, "special": special, **flags}
            for i, (text, special) in enumerate(added)
        ],
        "model": {**SPEC["model"], "vocab": vocab, "merges": []},
    }
    if edit is not None:
        edit(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    return folder


def write(folder: Path, name: str, value: object) -> Path:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


# Encoding -----------------------------------------------------------------------------------

# GPT-2's words, after digits have been set apart one by one: what llama.cpp does for "smollm".
WORDS = regex.compile(r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
RANKS = {tuple(pair): rank for rank, pair in enumerate(SPEC["model"]["merges"])}
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


def words(text: str) -> list[str]:
    parts = [part for part in regex.split(r"(\p{N})", text) if part]
    return [word for part in parts for word in WORDS.findall(part)]


def merged(word: str) -> list[str]:
    """Byte-pair encoding as it is told in books: merge the best-ranked pair until none is left."""
    pieces = [CHARACTER_OF[byte] for byte in word.encode()]
    while True:
        pairs = [RANKS.get(pair, len(RANKS)) for pair in itertools.pairwise(pieces)]
        if not pairs or min(pairs) == len(RANKS):
            return pieces
        at = pairs.index(min(pairs))
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def reference_ids(text: str) -> list[int]:
    return [SPEC["model"]["vocab"][p] for word in words(text) for p in merged(word)]


@pytest.mark.parametrize("text", SCRIPTS)
def test_ids_equal_a_book_implementation_of_the_vocabulary(text):
    assert EMBEDDED.encode(text) == reference_ids(text)
    assert EMBEDDED.encode_plain(text) == reference_ids(text)


@given(any_text)
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_and_equals_the_book(text):
    ids = EMBEDDED.encode_plain(text)
    assert ids == reference_ids(text)
    assert EMBEDDED.decode(ids) == text


@pytest.mark.parametrize("encode", ["encode", "encode_plain"])
def test_others_run_while_a_long_text_is_encoded(encode):
    """A server's other clients must not wait: the library lets go of the GIL, or does not."""
    text = "word and " * 100_000
    started, has_run = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: started.wait() and has_run.set())
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from here on nobody runs unless the GIL is let go of
    try:
        started.set()
        ids = getattr(EMBEDDED, encode)(text)
        ran = has_run.is_set()
    finally:
        sys.setswitchinterval(interval)
    other.join()
    assert ran
    assert EMBEDDED.decode(ids) == text


@given(any_text)
@settings(max_examples=50, deadline=None)
def test_long_texts_are_encoded_as_short_ones_are(text):
    long = text * (bpe_vocabulary.LONG_TEXT // max(1, len(text)) + 1)
    assert EMBEDDED.encode(long) == LIBRARY.encode(long, add_special_tokens=False).ids


def test_well_known_ids_of_smollm2():
    text = EMBEDDED.render([{"role": "user", "content": "12"}])
    # The default system turn as published with the model.
    head = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411]
    assert EMBEDDED.encode(text)[: len(head)] == head
    assert len(EMBEDDED.encode("1234567")) == 7


def test_ids_equal_those_of_transformers_reading_the_same_folder():
    import transformers

    fast = transformers.PreTrainedTokenizerFast.from_pretrained(embedded_model())
    messages = [
        {"role": "user", "content": "Füße und 日本語"},
        {"role": "assistant", "content": ""},
    ]
    rendered = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert EMBEDDED.render(messages) == rendered
    assert EMBEDDED.encode(rendered) == fast.encode(rendered)
    for text in SCRIPTS:
        ids = EMBEDDED.encode(text)
        assert ids == fast.encode(text)
        assert EMBEDDED.decode(ids) == fast.decode(ids)


def test_bytes_that_the_vocabulary_lacks_leave_no_id():
    assert EMBEDDED.encode("a\x16b") == EMBEDDED.encode("a") + EMBEDDED.encode("b")
    assert EMBEDDED.encode("\x16") == []


def test_special_texts_are_tokens_when_encoded_and_characters_when_plain():
    text = "a<|im_end|>b<|im_start|>"
    assert [i for i in EMBEDDED.encode(text) if i < 17] == [2, 1]
    plain = EMBEDDED.encode_plain(text)
    assert min(plain) >= 17
    assert EMBEDDED.decode(plain) == text


def test_plain_text_makes_no_added_token_special_or_not(tmp_path):
    tokenizer = Tokenizer.load(small_folder(tmp_path))
    assert tokenizer.encode("<t><s>") == [258, 256]
    assert tokenizer.encode_plain("<t><s>") == list(b"<t><s>")


def test_added_runs_of_spaces_stay_ordinary_text(tmp_path):
    def add_spaces(spec):
        spec["added_tokens"].append({**spec["added_tokens"][2], "id": 260, "content": "   "})

    tokenizer = Tokenizer.load(small_folder(tmp_path, add_spaces))
    assert tokenizer.encode_plain("   x") == tokenizer.encode("   x") == [260, ord("x")]


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    def limit(spec):
        spec["truncation"] = {
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
        }  # fmt: skip

    assert Tokenizer.load(small_folder(tmp_path, limit)).encode("abcd") == list(b"abcd")


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00", "\ud83dx"])
def test_half_a_surrogate_pair_is_refused(text):
    for encode in (EMBEDDED.encode, EMBEDDED.encode_plain, check_text):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            encode(text)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        EMBEDDED.find([1], text)


@pytest.mark.parametrize("text", [None, b"a", 5, ["a"]])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(InvalidRequestError, match="must be a string"):
        EMBEDDED.encode(text)


def test_the_error_names_the_parameter():
    with pytest.raises(InvalidRequestError) as caught:
        check_text("\ud83d", "prompt")
    assert caught.value.param == "prompt"
    assert "U+D83D" in caught.value.message


# BOS (bug-cases 52) -----------------------------------------------------------------------------


def test_the_embedded_model_starts_plain_prompts_with_nothing():
    assert EMBEDDED.bos_id is None
    assert EMBEDDED.encode("Hi", bos=True) == EMBEDDED.encode("Hi")


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>", "special": True}])
def test_bos_comes_exactly_once_and_only_when_asked(tmp_path, token):
    folder = write(
        small_folder(tmp_path),
        "tokenizer_config.json",
        {"bos_token": token, "add_bos_token": True},
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id == 256
    assert tokenizer.encode("a") == [97]
    assert tokenizer.encode("a", bos=True) == [256, 97]
    assert tokenizer.encode("<s>a", bos=True) == [256, 97]
    assert tokenizer.encode("", bos=True) == [256]
    assert tokenizer.encode_plain("a") == [97]


def test_bos_is_known_from_the_post_processor_and_never_added_by_it(tmp_path):
    def add_bos(spec):
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
        }

    folder = write(small_folder(tmp_path, add_bos), "tokenizer_config.json", {"bos_token": "<s>"})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id == 256
    assert tokenizer.encode("a") == [97]
    assert tokenizer.encode("a", bos=True) == [256, 97]


def test_a_bos_token_that_nothing_adds_is_no_bos(tmp_path):
    folder = write(small_folder(tmp_path), "tokenizer_config.json", {"bos_token": "<s>"})
    assert Tokenizer.load(folder).bos_id is None


def test_a_template_that_writes_bos_gives_one(tmp_path):
    folder = write(
        small_folder(tmp_path),
        "tokenizer_config.json",
        {"bos_token": "<s>", "add_bos_token": True, "chat_template": "{{ bos_token }}x"},
    )
    tokenizer = Tokenizer.load(folder)
    text = tokenizer.render([{"role": "user", "content": "Hi"}])
    assert tokenizer.encode(text) == tokenizer.encode(text, bos=True) == [256, ord("x")]


# Decoding and streams (bug-cases 5 to 8) ----------------------------------------------------------


@given(st.one_of(any_ids, short_ids), st.booleans())
@example([0, 5, 16, 49152, 49155], False)
@settings(max_examples=400, deadline=None)
def test_decode_equals_the_library(ids, skip_special):
    library = LIBRARY.decode(ids, skip_special_tokens=skip_special)
    assert EMBEDDED.decode(ids, skip_special=skip_special) == library


@given(st.one_of(any_ids, short_ids, any_text.map(lambda t: list(t.encode()))), st.booleans())
@settings(max_examples=400, deadline=None)
def test_a_stream_equals_decode(ids, skip_special):
    pieces = streamed(EMBEDDED, ids, skip_special)
    assert "".join(pieces) == EMBEDDED.decode(ids, skip_special=skip_special)


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_stream_of_single_bytes_holds_every_character_until_it_is_whole(text, tmp_path):
    tokenizer = Tokenizer.load(small_folder(tmp_path))
    pieces = streamed(tokenizer, list(text.encode()))
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[-1] == ""


@given(any_text, st.data())
@settings(max_examples=200, deadline=None)
def test_whole_characters_never_wait(text, data):
    ids = EMBEDDED.encode_plain(text)
    cut = data.draw(st.integers(0, len(ids)))
    stream = EMBEDDED.stream()
    shown = "".join(map(stream.push, ids[:cut]))
    data_shown = b"".join(map(EMBEDDED.token_bytes, ids[:cut]))
    assert shown == data_shown.decode("utf-8", "ignore")
    assert text.startswith(shown)


def test_a_window_of_decoding_would_fail_this_test():
    # The twin: decoding each token alone is what loses characters.
    ids = EMBEDDED.encode_plain(SCRIPTS[6])
    assert "".join(EMBEDDED.decode([i]) for i in ids) != EMBEDDED.decode(ids)


def test_bad_bytes_are_replaced_at_once_and_an_unfinished_end_once(tmp_path):
    tokenizer = Tokenizer.load(small_folder(tmp_path))
    smile = list("🙂".encode())
    assert streamed(tokenizer, [*smile[:3], 32, 97]) == ["", "", "", "\ufffd ", "a", ""]
    assert streamed(tokenizer, [255, 97]) == ["\ufffd", "a", ""]
    assert streamed(tokenizer, smile[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_inside_a_character_do_not_break_it(tmp_path):
    tokenizer = Tokenizer.load(small_folder(tmp_path))
    ids = [*"é".encode(), 257, *"🙂".encode()[:2], 256, *"🙂".encode()[2:]]
    assert "".join(streamed(tokenizer, ids)) == "é🙂" == tokenizer.decode(ids)


def test_added_tokens_have_their_own_text(tmp_path):
    tokenizer = Tokenizer.load(small_folder(tmp_path))
    ids = [256, 97, 258, 259]
    assert tokenizer.decode(ids) == "a<t>"
    assert tokenizer.decode(ids, skip_special=False) == "<s>a<t>" + BAR_TOKEN
    library = BpeTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(ids, skip_special=False) == library.decode(
        ids, skip_special_tokens=False
    )


def test_an_added_token_of_one_letter_is_that_letter(tmp_path):
    # The library reads "ö" as the byte whose stand-in it is, which is no text.
    def add_letter(spec):
        vocab = spec["model"]["vocab"]  # no text has this byte, so DeepSeek's first one has none
        vocab["\u2603"] = vocab.pop("ö")
        spec["added_tokens"].append({**spec["added_tokens"][2], "id": 260, "content": "ö"})

    tokenizer = Tokenizer.load(small_folder(tmp_path, add_letter))
    assert tokenizer.encode("aö") == tokenizer.encode_plain("aö") == [97, 260]
    assert tokenizer.encode_plain("ö<s>") == [260, *b"<s>"]
    assert tokenizer.decode([97, 260]) == "aö"
    assert "".join(streamed(tokenizer, [97, 260])) == "aö"
    library = BpeTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.decode([97, 260]) == "a\ufffd"


@pytest.mark.parametrize("token_id", [-1, 2**40, "1", None, 1.5])
def test_what_is_no_id_is_refused(token_id):
    with pytest.raises(InvalidRequestError, match="not a token id"):
        EMBEDDED.decode([token_id])
    with pytest.raises(InvalidRequestError, match="not a token id"):
        EMBEDDED.stream().push(token_id)


# Finding text ---------------------------------------------------------------------------------


def test_find_covers_every_occurrence():
    ids = EMBEDDED.encode("The cat sat. The cat ran. A cat!")
    spans = EMBEDDED.find(ids, "The cat")
    assert len(spans) == 2
    assert all(EMBEDDED.decode(ids[start:end]).strip() == "The cat" for start, end in spans)


def test_find_sees_special_tokens():
    ids = EMBEDDED.encode("a<|im_end|>\n<|im_start|>user\nb")
    (span,) = EMBEDDED.find(ids, "<|im_start|>user")
    assert EMBEDDED.decode(ids[slice(*span)], skip_special=False) == "<|im_start|>user"
    assert EMBEDDED.find(ids, "a\n") == []


def test_find_inside_tokens_and_characters(tmp_path):
    ids = EMBEDDED.encode("unbelievable")
    assert EMBEDDED.find(ids, "b") == [(s, s + 1) for s, _ in EMBEDDED.find(ids, "b")]
    tokenizer = Tokenizer.load(small_folder(tmp_path))
    assert tokenizer.find(list("x🙂é🙂".encode()), "🙂") == [(1, 5), (7, 11)]
    assert tokenizer.find(list(b"aaaa"), "aa") == [(0, 2), (2, 4)]
    assert tokenizer.find([97, 999, 98, 999], "b") == [(2, 3)]
    assert tokenizer.find([], "a") == []


def test_find_of_nothing_is_refused():
    with pytest.raises(InvalidRequestError, match="empty"):
        EMBEDDED.find([1, 2], "")


@given(any_ids, st.data())
@settings(max_examples=200, deadline=None)
def test_found_spans_are_the_shortest_that_hold_the_text(ids, data):
    whole = EMBEDDED.decode(ids, skip_special=False)
    start = data.draw(st.integers(0, len(whole)))
    text = whole[start : data.draw(st.integers(start, len(whole)))]
    if not text or "\ufffd" in text:
        return
    wanted, pieces = text.encode(), [EMBEDDED.token_bytes(i, skip_special=False) for i in ids]
    edges = [0, *itertools.accumulate(map(len, pieces))]
    at = [match.start() for match in re.finditer(re.escape(wanted), b"".join(pieces))]
    spans = EMBEDDED.find(ids, text)
    assert len(spans) == len(at) == whole.count(text)
    for (start, end), first in zip(spans, at, strict=True):
        assert edges[start] <= first < edges[start + 1]
        assert edges[end - 1] < first + len(wanted) <= edges[end]


# Loading ----------------------------------------------------------------------------------------


def test_the_embedded_tokenizer_knows_its_size_and_its_end():
    assert EMBEDDED.vocab_size == 49152
    assert EMBEDDED.stop_ids == {2}


def test_stop_ids_come_from_every_place(tmp_path):
    folder = small_folder(tmp_path)
    write(folder, "generation_config.json", {"eos_token_id": [1, 2]})
    write(folder, "config.json", {"eos_token_id": 3})
    write(folder, "tokenizer_config.json", {"eos_token": {"content": "</s>"}})
    assert Tokenizer.load(folder).stop_ids == {1, 2, 3, 257}


def test_where_no_file_names_the_end_of_a_turn_the_template_does(tmp_path):
    def add_end(spec):
        spec["added_tokens"].append({**spec["added_tokens"][1], "id": 260, "content": "<|im_end|>"})

    folder = small_folder(tmp_path, add_end)
    write(folder, "config.json", {"eos_token_id": 257})
    assert Tokenizer.load(folder).stop_ids == {257}
    write(folder, "tokenizer_config.json", {"chat_template": "<|im_end|><|eot_id|>"})
    assert Tokenizer.load(folder).stop_ids == {257, 260}
    write(folder, "generation_config.json", {"eos_token_id": 258})
    assert Tokenizer.load(folder).stop_ids == {257, 258}


def test_no_stop_ids_is_allowed(tmp_path):
    write(small_folder(tmp_path), "config.json", {"eos_token_id": None})
    assert Tokenizer.load(tmp_path).stop_ids == frozenset()


@pytest.mark.parametrize("value", [-1, "2", [1, None], True, 1.0])
def test_odd_stop_ids_are_refused(tmp_path, value):
    write(small_folder(tmp_path), "config.json", {"eos_token_id": value})
    with pytest.raises(ModelError, match="eos_token_id"):
        Tokenizer.load(tmp_path)


def test_the_template_file_goes_before_the_config(tmp_path):
    folder = write(
        small_folder(tmp_path), "tokenizer_config.json", {"chat_template": "from the config"}
    )
    messages = [{"role": "user", "content": "Hi"}]
    assert Tokenizer.load(folder).render(messages) == "from the config"
    (folder / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert Tokenizer.load(folder).render(messages) == "from the file"


def test_of_several_templates_the_default_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}, 5]
    write(small_folder(tmp_path), "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.load(tmp_path).render([{"role": "user"}]) == "d"


def test_of_several_templates_the_one_for_tools_is_taken_with_tools(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(small_folder(tmp_path), "tokenizer_config.json", {"chat_template": named})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.render([{"role": "user"}], tools=[{"name": "f"}]) == "t"
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("from the file", encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.render([{"role": "user"}], tools=[{"name": "f"}]) == "from the file"
    assert tokenizer.render([{"role": "user"}]) == "d"


def test_without_a_default_there_is_no_template(tmp_path):
    named = [{"name": "tool_use", "template": "t"}]
    write(small_folder(tmp_path), "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.load(tmp_path).template is None


def test_special_tokens_may_stand_in_a_file_of_their_own(tmp_path):
    write(small_folder(tmp_path), "special_tokens_map.json", {"eos_token": {"content": "</s>"}})
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ eos_token }}{{ x_token }}"}
    write(tmp_path, "tokenizer_config.json", config | {"x_token": "<t>", "add_bos_token": False})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.stop_ids == {257}
    assert tokenizer.render([{"role": "user"}]) == "<s></s><t>"


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}", "{{ 'a' * 10 ** 12 }}"])
def test_a_template_that_no_template_may_be_stops_the_loading(tmp_path, source):
    write(small_folder(tmp_path), "tokenizer_config.json", {"chat_template": source})
    with pytest.raises(ModelError, match=r"^The model's chat template is refused: [^\n]+$"):
        Tokenizer.load(tmp_path)


def test_without_a_template_chat_is_refused_with_advice(tmp_path):
    tokenizer = Tokenizer.load(small_folder(tmp_path))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.render([{"role": "user", "content": "Hi"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("config.json", "nonsense"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path, name, content):
    (small_folder(tmp_path) / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer(_config)?\.json|config\.json|template"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("config", [{"vocab_size": 258}, {"text_config": {"vocab_size": 258}}])
def test_no_text_gives_an_id_that_the_model_has_no_row_for(tmp_path, config):
    folder = small_folder(tmp_path)
    assert Tokenizer.load(folder).encode("<s><t>") == [256, 258]
    tokenizer = Tokenizer.load(write(folder, "config.json", config))
    assert tokenizer.vocab_size == 258
    assert tokenizer.encode("<s><t>") == [256, *b"<t>"]
    assert tokenizer.decode([256, *b"<t>"], skip_special=False) == "<s><t>"


def test_a_config_that_numbers_tokens_otherwise_is_refused(tmp_path):
    added = {"256": {"content": "<s>"}, "258": {"content": "<t>"}, "300": {"content": "<new>"}}
    folder = write(small_folder(tmp_path), "tokenizer_config.json", {"added_tokens_decoder": added})
    assert Tokenizer.load(folder).encode("<t>") == [258]
    added["257"] = {"content": "<t>"}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": added})
    with pytest.raises(ModelError, match=r"'<t>' is 257 in tokenizer_config.json, but 258 in"):
        Tokenizer.load(folder)


def test_a_vocabulary_larger_than_the_model_is_another_models(tmp_path):
    write(small_folder(tmp_path), "config.json", {"vocab_size": 255})
    with pytest.raises(ModelError, match="different models"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("value", [0, -1, "9", 2.5, True, [9]])
def test_an_odd_vocab_size_is_refused(tmp_path, value):
    write(small_folder(tmp_path), "config.json", {"vocab_size": value})
    with pytest.raises(ModelError, match="vocab_size"):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_is_not_byte_level_is_refused(tmp_path):
    def metaspace(spec):
        spec["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}

    with pytest.raises(ModelError, match="only byte-level"):
        Tokenizer.load(small_folder(tmp_path, metaspace))


def test_no_code_of_a_model_folder_runs(tmp_path):
    # bug-cases 144: auto_map names code in the folder; nothing may import it.
    folder = small_folder(tmp_path)
    (folder / "tokenization_evil.py").write_text("raise SystemExit(9)", encoding="utf-8")
    auto_map = {"AutoTokenizer": ["tokenization_evil.Evil", None]}
    write(folder, "tokenizer_config.json", {"auto_map": auto_map, "tokenizer_class": "Evil"})
    assert Tokenizer.load(folder).encode("a") == [97]


# tiktoken.model -------------------------------------------------------------------------------


def ranks(*merges: bytes) -> bytes:
    """A vocabulary of single bytes and some merges."""
    tokens = [*(bytes([byte]) for byte in range(256)), *merges]
    return b"".join(b"%s %d\n" % (base64.b64encode(one), i) for i, one in enumerate(tokens))


def ranked_folder(folder: Path, data: bytes | None = None, **config: Any) -> Path:
    """A model folder with a `tiktoken.model` and five special tokens behind 258 ranks."""
    (folder / "tiktoken.model").write_bytes(ranks(b"th", b"the") if data is None else data)
    named = {"258": "[BOS]", "259": "[EOS]", "260": "<|im_end|>", "262": "<think>"}
    added = {i: {"content": text, "special": text != "<think>"} for i, text in named.items()}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": added, **config})
    return write(folder, "config.json", {"vocab_size": 263, "eos_token_id": 260})


def test_ranks_give_ids_and_texts(tmp_path):
    config = {"eos_token": "[EOS]", "chat_template": "[BOS]<|im_end|>"}
    tokenizer = Tokenizer.load(ranked_folder(tmp_path, None, bos_token="[BOS]", **config))
    assert (tokenizer.kind, tokenizer.vocab_size) == ("tiktoken.model", 263)
    assert (tokenizer.bos_id, tokenizer.stop_ids) == (None, {259, 260})
    assert tokenizer.encode("the thé") == [257, 32, 256, *"é".encode()]
    ids = tokenizer.encode("the<|im_end|><think><|reserved_token_261|>")
    assert ids == [257, 260, 262, 261]
    assert tokenizer.decode(ids) == "the<think>"
    assert tokenizer.decode(ids, skip_special=False) == "the<|im_end|><think><|reserved_token_261|>"
    assert max(tokenizer.encode_plain("the<|im_end|><think>")) < 258
    assert tokenizer.encode(tokenizer.render([{"role": "user"}]), bos=True) == [258, 260]
    assert tokenizer.encode("<|reserved_token_263|>") != [263]


def test_ranks_may_be_told_to_begin_with_bos(tmp_path):
    tokenizer = Tokenizer.load(ranked_folder(tmp_path, bos_token="[BOS]", add_bos_token=True))
    assert tokenizer.encode("a", bos=True) == tokenizer.encode("[BOS]a", bos=True) == [258, 97]


def test_without_a_config_there_are_256_special_ids(tmp_path):
    (ranked_folder(tmp_path) / "config.json").unlink()
    assert Tokenizer.load(tmp_path).vocab_size == 258 + 256


def test_ranks_go_before_what_was_converted_from_them(tmp_path):
    small_folder(tmp_path)
    assert Tokenizer.load(tmp_path).kind == "tokenizer.json"
    assert Tokenizer.load(ranked_folder(tmp_path)).kind == "tiktoken.model"


@pytest.mark.parametrize("token_id", [-1, 2**40, "1", None, 1.5])
def test_what_is_no_id_of_ranks_is_refused(tmp_path, token_id):
    tokenizer = Tokenizer.load(ranked_folder(tmp_path))
    assert tokenizer.decode([300]) == ""
    with pytest.raises(InvalidRequestError, match="not a token id"):
        tokenizer.decode([token_id])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the byte 0 is no token"),
        (ranks()[:-9], "the byte 255 is no token"),
        (ranks(b"th")[:-2], "line 257 "),
        (ranks(b"th").replace(b"dGg= 256", b"dGg= 257"), "line 257 repeats a token"),
        (ranks(b"th", b"th"), "line 258 repeats a token"),
        (ranks(b"th").replace(b"dGg=", b"dG!="), "line 257 is no token and its rank"),
        (ranks(b"th").replace(b" 256", b" x"), "line 257 is no token and its rank"),
        (ranks() + b"\n", "line 257 is no token and its rank"),
        (b"\x80\x04K\x01.", "line 1 is no token and its rank"),
    ],
)
def test_broken_ranks_are_refused_by_line(tmp_path, data, message):
    with pytest.raises(ModelError, match=rf"tiktoken\.model in the model folder.*{message}"):
        Tokenizer.load(ranked_folder(tmp_path, data))


def test_no_code_beside_ranks_runs(tmp_path):
    # bug-cases 144, and how the Moonlight and Kimi models come.
    folder = ranked_folder(
        tmp_path, auto_map={"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}
    )
    (folder / "tokenization_moonshot.py").write_text("raise SystemExit(9)", encoding="utf-8")
    assert Tokenizer.load(folder).encode("a") == [97]


# -- special tokens that are shown ----------------------------------------------------------------


@given(
    ids=st.lists(st.integers(0, 265), max_size=20),
    shown=st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "the", "no token"]), max_size=3),
    skip=st.booleans(),
)
def test_some_special_tokens_may_be_shown_and_a_stream_shows_the_same(ids, shown, skip):
    tokenizer = Tokenizer(byte_tokenizer())
    names = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    left = [one for one in ids if not (skip and one in names and names[one] not in shown)]
    expected = tokenizer.decode(left, skip_special=False)
    assert tokenizer.decode(ids, skip_special=skip, shown=shown) == expected
    stream = tokenizer.stream(skip_special=skip, shown=shown)
    assert "".join([*map(stream.push, ids), stream.flush()]) == expected


def test_a_stream_knows_whether_it_ends_inside_a_character():
    tokenizer = Tokenizer(byte_tokenizer())
    stream = tokenizer.stream()
    pending = [(stream.push(one), stream.pending) for one in (*tokenizer.encode("€a"), 2)]
    assert pending == [("", True), ("", True), ("€", False), ("a", False), ("", False)]


def test_a_chat_template_of_ones_own_takes_the_place_of_the_folders(tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}")
    tokenizer = Tokenizer.load(embedded_model(), own)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render(messages) == "[hi]<|im_end|>" != EMBEDDED.render(messages)


@pytest.mark.parametrize(("text", "why"), [(None, "no chat template"), ("{% if", "not valid")])
def test_a_template_of_ones_own_that_cannot_be_used_is_refused(text, why, tmp_path):
    path = tmp_path / "own.jinja"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelError, match=why):
        Tokenizer.load(embedded_model(), path)
