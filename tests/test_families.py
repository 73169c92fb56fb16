"""The four families from a hub id to an edited conversation, against `transformers`.

Each is a repository in the form of the real one (see `tests.family_folders`) behind a stand-in of
the hub. It is loaded by its id, talks over HTTP, and has its context edited in every mode. Errors
are relative to the root mean square of the oracle's logits; float32 passes agree to 1e-6 or so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from huggingface_hub import constants
from torch import Tensor

from leyline import Engine
from leyline.cli import main
from leyline.context import Context
from leyline.errors import ModelError
from leyline.model.presets import HUB_IDS
from leyline.server import Worker, create_app
from tests.checkpoints import MTP_FILE, NEVER_READ
from tests.family_folders import FAMILIES, prompt_ids, write_repository
from tests.hand_cache import HandCache
from tests.hub_stand_in import HubStandIn, hub_stand_in, point_to
from tests.lockstep import RecordingExecutor, Sample, poison, relative_error
from tests.model.oracle import Oracle
from tests.probes import ForcedExecutor, Rows, latents_left, rows_of

TOLERANCE = 1e-4
NUM_SLOTS = 2048
OPTIONS: dict[str, Any] = {
    "progress": False,
    "num_threads": 1,
    "kv_cache_tokens": NUM_SLOTS,
    "keep_versions": 0,
}
SMALL_FILES = {"config.json", "generation_config.json", "tokenizer_config.json"}
INDEX = "model.safetensors.index.json"
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = "the weather in the land is 17 and rainy, the wind is north, and all is well in there"
STUB = "[evicted]"
BEHIND = " what now? And then, where does one go when it rains in the land?"
NEXT = {"role": "user", "content": "and then?"}
STOPS = {
    "deepseek-v2-lite": {"<\uff5cend\u2581of\u2581sentence\uff5c>"},
    "moonlight-16b-a3b": {"<|im_end|>", "[EOS]"},
    "glm-4.7-flash": {"<|endoftext|>", "<|user|>", "<|observation|>"},
    "joyai-llm-flash": {"<\uff5cend\u2581of\u2581sentence\uff5c>"},
}
ONE_PERCENT_OFF = ("self_attn.kv_b_proj", "self_attn.o_proj", "mlp.gate")
READY_S = 60


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model_id(family: str) -> str:
    return HUB_IDS[family]


@pytest.fixture(scope="module")
def oracle(family: str, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return write_repository(family, tmp_path_factory.mktemp(family) / "repository")


@pytest.fixture(scope="module")
def home(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What HF_HOME is."""
    return tmp_path_factory.mktemp(f"{family}-home")


@pytest.fixture(scope="module")
def hub(model_id: str, oracle: Oracle, home: Path) -> Iterator[HubStandIn]:
    with hub_stand_in() as stand_in, pytest.MonkeyPatch.context() as patch:
        point_to(stand_in.url, home, patch)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        stand_in.publish(model_id, oracle.folder)
        yield stand_in


class Scripted(RecordingExecutor, ForcedExecutor):
    """Keeps what it samples from, and has the model say what a test wants said."""


@pytest.fixture(scope="module")
def engine(model_id: str, hub: HubStandIn) -> Iterator[Engine]:
    with Engine(model=model_id, **OPTIONS) as engine:
        engine._parts = dataclasses.replace(
            engine.parts, executor=Scripted.of(engine.parts.executor)
        )
        script(engine, "")
        poison(engine)
        yield engine


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[TestClient]:
    worker = Worker(engine)
    worker.start()
    with TestClient(create_app(worker), base_url="http://127.0.0.1:8000") as client:
        yield client
    worker.stop()


def executor(engine: Engine) -> Scripted:
    found = engine.parts.executor
    assert isinstance(found, Scripted)
    return found


def samples(engine: Engine) -> list[Sample]:
    """Everything that was sampled so far."""
    return executor(engine).samples


def script(engine: Engine, text: str) -> None:
    """Have the model say a text next; behind it, it speaks for itself."""
    executor(engine).replies = iter(engine.tokenizer.encode(text))


def shards(oracle: Oracle) -> list[Path]:
    """The files of the weights, without one that holds an MTP layer only."""
    found = oracle.folder.glob("*.safetensors")
    return sorted(path for path in found if path.name != MTP_FILE)


# Loading and generating ---------------------------------------------------------------------------


def test_the_first_start_fetches_what_an_engine_reads(
    family: str, model_id: str, engine: Engine, hub: HubStandIn, oracle: Oracle
) -> None:
    text = {"tiktoken.model"} if family == "moonlight-16b-a3b" else {"tokenizer.json"}
    text |= {name for name in ("chat_template.jinja",) if (oracle.folder / name).is_file()}
    weights = {path.name for path in shards(oracle)}
    assert set(hub.asked("GET")) == SMALL_FILES | {INDEX} | text | weights
    assert len(weights) > 1 and (oracle.folder / NEVER_READ[0]).is_file()
    assert engine.model_name == model_id
    assert engine.parts.executor.model.dtype == torch.float32


def transformers_greedy(oracle: Oracle, ids: Sequence[int], count: int, num_ids: int) -> list[int]:
    """What `generate` says next; rows of the embedding that have no id are not to be chosen."""
    from transformers import GenerationConfig

    rows = oracle.config.vocab_size
    options = GenerationConfig(
        do_sample=False,
        max_new_tokens=count,
        suppress_tokens=list(range(num_ids, rows)) or None,
        eos_token_id=rows,  # none: it goes on to the end
        pad_token_id=0,
    )
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        out = oracle.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=options
        )
    return out[0, len(ids) :].tolist()


@contextlib.contextmanager
def one_percent_off(oracle: Oracle, name: str) -> Iterator[None]:
    """The oracle with one of its parameters 1 % too large."""
    value = oracle.model.get_parameter(name).data
    kept = value.clone()
    value *= 1.01
    try:
        yield
    finally:
        value.copy_(kept)


def worst_error(oracle: Oracle, ids: Sequence[int], sampled: Sequence[Sample]) -> float:
    """The largest error of the logits that tokens behind a prompt were sampled from."""
    tokens = [*ids, *(sample.token for sample in sampled)]
    logits = HandCache(oracle.model, tokens).compute()
    return max(relative_error(one.logits, logits[one.length - 1]) for one in sampled)


def test_it_generates_what_transformers_generates(engine: Engine, oracle: Oracle) -> None:
    ids = prompt_ids(oracle.folder, [{"role": "user", "content": f"Look: {TOOL}"}])
    first = len(samples(engine))
    answer = engine.generate(ids, temperature=0, max_tokens=20, ignore_eos=True)
    said = transformers_greedy(oracle, ids, 20, engine.parts.num_tokens)
    assert list(answer.token_ids) == said and len(set(said)) > 5
    mine = samples(engine)[first:]
    assert len(mine) == 20
    assert worst_error(oracle, ids, mine) < TOLERANCE
    for name in ONE_PERCENT_OFF:
        with one_percent_off(oracle, f"model.layers.1.{name}.weight"):
            assert worst_error(oracle, ids, mine) > 3 * TOLERANCE


# Over HTTP ----------------------------------------------------------------------------------------


@dataclass
class Talk:
    """A client and its session.

    Attributes:
        http: Speaks to the server.
        model_id: What it asks for.
        session: The session's name, with which its first message begins.
        messages: The history that it believes in.
    """

    http: TestClient
    model_id: str
    session: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, message: dict[str, str], **more: Any) -> dict[str, Any]:
        """A greedy turn; the whole answer."""
        self.messages.append(message)
        body = {"model": self.model_id, "session_id": self.session, "messages": self.messages}
        body |= {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **more}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        self.messages.append(answer.json()["choices"][0]["message"])
        return answer.json()

    def edit(self, mode: str, target: str = TOOL, **more: Any) -> dict[str, Any]:
        """Put the stub in the place of a text in the session."""
        change = {"match": target, "replacement": STUB, "mode": mode, **more}
        body = {"session_id": self.session, "directives": [change]}
        answer = self.http.post("/v1/directives", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def believe(self, target: str = TOOL) -> None:
        """Do to the history what was done to the session."""
        old = self.messages[0]["content"]
        assert target in old
        self.messages[0] = {"role": "user", "content": old.replace(target, STUB)}

    @property
    def info(self) -> dict[str, Any]:
        return self.http.get(f"/v1/sessions/{self.session}?tokens=true").json()

    @property
    def tokens(self) -> list[int]:
        return self.info["token_ids"]


@pytest.fixture
def talk(http: TestClient, model_id: str, request: pytest.FixtureRequest) -> Talk:
    return Talk(http, model_id, request.node.originalname)


def told(talk: Talk, target: str = TOOL, **more: Any) -> dict[str, Any]:
    """The first turn: no other session has its beginning."""
    content = f"{talk.session}, look: ({target}){BEHIND}"
    return talk.say({"role": "user", "content": content}, **more)


def test_a_chat_by_hub_name_is_what_transformers_says(
    talk: Talk, engine: Engine, oracle: Oracle
) -> None:
    messages = [SYSTEM, {"role": "user", "content": f"{TOOL}. Ünïcode 漢字?"}]
    ids = prompt_ids(oracle.folder, messages)
    talk.messages = messages[:1]
    answer = talk.say(messages[1], max_tokens=8)
    said = transformers_greedy(oracle, ids, 8, engine.parts.num_tokens)
    assert talk.tokens == [*ids, *said]
    assert answer["model"] == talk.model_id
    assert answer["usage"]["prompt_tokens"] == len(ids)
    message = answer["choices"][0]["message"]
    told = (message.get("reasoning_content") or "") + (message["content"] or "")
    assert told == engine.tokenizer.decode(said)  # GLM's prompt opens its reasoning
    assert answer["choices"][0]["finish_reason"] == "length"
    assert prompt_ids(oracle.folder, [messages[1]]) != ids


def test_the_models_name_is_its_hub_id_and_no_path(
    talk: Talk, http: TestClient, home: Path
) -> None:
    listed = http.get("/v1/models")
    (card,) = listed.json()["data"]
    assert card["id"] == talk.model_id and str(home) not in listed.text
    assert http.get(f"/v1/models/{talk.model_id}").json() == card
    body = {"model": f"{talk.model_id}-x", "messages": [NEXT]}
    assert http.post("/v1/chat/completions", json=body).status_code == 404


def test_a_turn_ends_where_the_familys_turns_end(engine: Engine, family: str) -> None:
    tokenizer = engine.tokenizer
    ends = {tokenizer.decode([one], skip_special=False) for one in tokenizer.stop_ids}
    assert ends == STOPS[family]
    assert all(one < engine.parts.num_tokens for one in tokenizer.stop_ids)


# Edits --------------------------------------------------------------------------------------------


class OnePositionOff(HandCache):
    """A reference that turns what it carries one position too far."""

    def turn(self, band: Tensor, delta: int) -> Tensor:
        return super().turn(band, delta + 1)


def by_hand(
    oracle: Oracle,
    tokens: Sequence[int],
    after: Sequence[int],
    receipt: dict[str, Any],
    kind: type[HandCache] = HandCache,
) -> HandCache:
    """A session's context, of whose last token there is no row, with an edit done by hand."""
    hand = kind(oracle.model, list(tokens))
    hand.compute(len(tokens) - 1)
    start, inserted = receipt["start"], receipt["inserted"]
    edit = (start, receipt["end"], list(after[start : start + inserted]), receipt["mode"])
    hand.edit([edit])
    assert hand.tokens == list(after)
    return hand


def go_on(hand: HandCache, context: Sequence[int], cached: int) -> Tensor:
    """The logits behind a context, of whose rows the first `cached` are those of the edit."""
    assert hand.tokens[:cached] == list(context[:cached])
    hand.forget_rows(cached)
    hand.tokens = list(context)
    return hand.compute()[-1]


def fresh(oracle: Oracle, context: Sequence[int]) -> Tensor:
    """The logits behind a context, from nothing."""
    return HandCache(oracle.model, list(context)).compute()[-1]


@dataclass
class Turn:
    """The turn behind an edit: its usage, its prompt, and what its first token was sampled from."""

    usage: dict[str, Any]
    context: list[int]
    logits: Tensor

    @classmethod
    def of(cls, talk: Talk, engine: Engine) -> Turn:
        first = len(samples(engine))
        usage = talk.say(dict(NEXT))["usage"]
        return cls(usage, talk.tokens[: usage["prompt_tokens"]], samples(engine)[first].logits)

    @property
    def cached(self) -> int:
        return self.usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def spliced(self) -> int:
        return self.usage["prompt_tokens_details"]["spliced_tokens"]


def test_a_turn_behind_an_amortized_edit_is_the_hand_edited_caches(
    talk: Talk, engine: Engine, oracle: Oracle
) -> None:
    told(talk)
    before = talk.tokens
    (receipt,) = talk.edit("amortize")["receipts"]
    after = talk.tokens
    assert receipt["mode_done"] == "amortize" and receipt["kept"] > 15
    assert talk.info["state"] == "spliced"
    talk.believe()
    turn = Turn.of(talk, engine)
    assert turn.spliced > 15
    hand = by_hand(oracle, before, after, receipt)
    assert relative_error(turn.logits, go_on(hand, turn.context, turn.cached)) < TOLERANCE
    assert relative_error(turn.logits, fresh(oracle, turn.context)) > 10 * TOLERANCE
    wrong = by_hand(oracle, before, after, receipt, OnePositionOff)
    assert relative_error(turn.logits, go_on(wrong, turn.context, turn.cached)) > 10 * TOLERANCE


# How a reply of each real model looks. The templates of the first and the third write it otherwise
# into a history: V2-Lite's with one more space, GLM's without the reasoning.
REPLIES = {
    "deepseek-v2-lite": " Rainy.<\uff5cend\u2581of\u2581sentence\uff5c>",
    "moonlight-16b-a3b": "Rainy.<|im_end|>",
    "glm-4.7-flash": "It is October.</think>Rainy.<|user|>",
    "joyai-llm-flash": "Rainy.<\uff5cend\u2581of\u2581sentence\uff5c>",
}


@pytest.mark.parametrize("mode", ["amortize", "forget"])
def test_a_client_that_knows_of_no_edit_goes_on_from_it(
    talk: Talk, engine: Engine, oracle: Oracle, family: str, mode: str
) -> None:
    talk.session += mode
    before, receipt, after = spliced(talk, engine, REPLIES[family], mode)
    turn = Turn.of(talk, engine)
    assert STUB in talk.info["text"] and TOOL not in talk.info["text"]
    hand = by_hand(oracle, before, after, {**receipt, "mode": "amortize"})
    errors = {
        "amortize": relative_error(turn.logits, go_on(hand, turn.context, turn.cached)),
        "forget": relative_error(turn.logits, fresh(oracle, turn.context)),
    }
    assert errors.pop(mode) < TOLERANCE < 10 * TOLERANCE < errors.popitem()[1]
    Turn.of(talk, engine)
    assert STUB in talk.info["text"] and TOOL not in talk.info["text"]


def spliced(
    talk: Talk, engine: Engine, reply: str, mode: str
) -> tuple[list[int], dict[str, Any], list[int]]:
    """A first turn with a reply that ends by itself, and an edit of it: its receipt, and the tokens
    before and behind it.
    """
    script(engine, reply)
    answer = told(talk, max_tokens=20, ignore_eos=False)
    assert answer["choices"][0]["finish_reason"] == "stop"
    before = talk.tokens
    (receipt,) = talk.edit(mode)["receipts"]
    return before, receipt, talk.tokens


def test_a_second_turn_without_an_edit_is_what_the_template_writes(
    talk: Talk, engine: Engine, oracle: Oracle, family: str
) -> None:
    script(engine, REPLIES[family])
    length = told(talk, max_tokens=20, ignore_eos=False)["usage"]["prompt_tokens"]
    turn = Turn.of(talk, engine)
    text = engine.tokenizer.decode(prompt_ids(oracle.folder, talk.messages[:3]), skip_special=False)
    assert engine.tokenizer.decode(turn.context, skip_special=False) == text
    assert length - 1 <= turn.cached and turn.spliced == 0
    assert relative_error(turn.logits, fresh(oracle, turn.context)) < TOLERANCE
    assert relative_error(turn.logits, fresh(oracle, turn.context[1:])) > 10 * TOLERANCE


def settled(talk: Talk) -> str:
    """The session's state once it is not healing any more: every look lets the engine step."""
    looks = (talk.info["state"] for _ in range(1000))
    return next((state for state in looks if state != "healing"), "healing")


def test_a_healed_session_is_a_fresh_prefills(talk: Talk, engine: Engine, oracle: Oracle) -> None:
    told(talk)
    before = talk.tokens
    result = talk.edit("heal")
    (receipt,) = result["receipts"]
    after = talk.tokens
    assert result["state"] == "healing" and receipt["kept"] > 15
    assert settled(talk) == "exact"
    talk.believe()
    turn = Turn.of(talk, engine)
    assert turn.spliced == 0 and turn.cached > receipt["end"] + receipt["delta"] + 15
    assert relative_error(turn.logits, fresh(oracle, turn.context)) < TOLERANCE
    carried = by_hand(oracle, before, after, {**receipt, "mode": "amortize"})
    assert relative_error(turn.logits, go_on(carried, turn.context, turn.cached)) > 10 * TOLERANCE


def rows_behind(engine: Engine, context: Context, text: str) -> Rows:
    """Copies of a context's rows from a text on: all of them saw it."""
    at = engine.tokenizer.find(context.tokens, text)[0][0]
    rows = rows_of(engine, context)
    return rows[0][:, at:], rows[1][:, at:]


def test_what_is_forgotten_in_the_cache_leaves_no_row_and_no_trace(
    talk: Talk, engine: Engine, oracle: Oracle
) -> None:
    secret = TOOL.replace("17", "4711-8899")
    told(talk, secret)
    prompt = engine.tokenizer.encode(f"{secret}{BEHIND}", bos=True)
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    assert talk.http.post("/v1/completions", json=body).status_code == 200
    before, find = talk.tokens, {"text": secret}
    mine = engine.sessions.get(talk.session).context
    saw = [rows_behind(engine, one, secret) for one in (mine, Context.of(prompt))]
    assert all(latents_left(engine, rows) == rows[0].shape[1] > 40 for rows in saw)
    assert talk.http.post("/v1/cache/find", json=find).json()["rows"] > 80
    result = talk.edit("forget", secret, scope="cache")
    assert result["purged"]["rows"] > 40 and result["state"] == "exact"
    assert not any(latents_left(engine, rows) for rows in saw)
    assert not talk.http.post("/v1/cache/find", json=find).json()["found"]
    after, (receipt,) = talk.tokens, result["receipts"]
    talk.believe(secret)
    turn = Turn.of(talk, engine)
    assert relative_error(turn.logits, fresh(oracle, turn.context)) < TOLERANCE
    kept = by_hand(oracle, before, after, {**receipt, "mode": "amortize"})
    assert relative_error(turn.logits, go_on(kept, turn.context, turn.cached)) > 10 * TOLERANCE


# Starting again, and asking before ----------------------------------------------------------------


def test_a_second_start_without_a_network_asks_nothing(
    model_id: str,
    engine: Engine,
    hub: HubStandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = len(hub.requests)
    assert before > 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with Engine(model=model_id, **OPTIONS) as again:
        said = again.generate([5, 6, 7], temperature=0, max_tokens=5)
    assert said.token_ids == engine.generate([5, 6, 7], temperature=0, max_tokens=5).token_ids
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        Engine(model=model_id, download_dir=str(tmp_path), **OPTIONS)
    assert len(hub.requests) == before


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command prints, after nothing of what came before."""
    capsys.readouterr()
    command = ["doctor", "--json", "--no-progress", "--kv-cache-tokens", str(NUM_SLOTS)]
    assert main([*command, *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def num_bytes(path: Path) -> int:
    return path.stat().st_size


def num_stored(oracle: Oracle) -> int:
    """Numbers that the oracle computes with."""
    buffers = oracle.model.named_buffers()
    biases = [value for name, value in buffers if name.endswith("e_score_correction_bias")]
    return sum(value.numel() for value in [*oracle.model.parameters(), *biases])


def test_the_doctor_says_what_the_engine_then_does(
    family: str,
    model_id: str,
    engine: Engine,
    oracle: Oracle,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = doctor(capsys, "--model", model_id)
    cache, tokenizer = engine.parts.cache, engine.tokenizer
    assert report["model"] == model_id
    assert report["parameters"]["total"] == num_stored(oracle) > report["parameters"]["active"]
    assert report["weights"]["dtype"] == "float32" and report["weights"]["is_complete"]
    assert report["weights"]["bytes"] == 4 * num_stored(oracle)
    assert report["weights"]["stored_bytes"] == sum(map(num_bytes, shards(oracle)))
    row = report["cache"]["bytes_per_token"]
    assert report["cache"]["tokens"] == cache.ckv.shape[1] == NUM_SLOTS
    assert row["float32"] * NUM_SLOTS == cache.ckv.nbytes + cache.kpe.nbytes
    assert row["bfloat16"] * NUM_SLOTS != cache.ckv.nbytes + cache.kpe.nbytes
    assert report["text"]["vocab_size"] == engine.parts.num_tokens
    assert report["text"]["stop_ids"] == sorted(tokenizer.stop_ids)
    assert report["text"]["bos_id"] == tokenizer.bos_id
    assert report["text"]["has_template"] and report["text"]["error"] is None
    assert doctor(capsys, "--preset", family)["parameters"] != report["parameters"]


def test_the_doctor_asks_for_no_weights(
    model_id: str,
    oracle: Oracle,
    hub: HubStandIn,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = len(hub.asked("GET"))
    report = doctor(capsys, "--model", model_id, "--download-dir", str(tmp_path))
    fetched = hub.asked("GET")[before:]
    assert fetched and not any(name.endswith(".safetensors") for name in fetched)
    assert report["parameters"]["total"] == num_stored(oracle)
    assert report["weights"]["stored_bytes"] == sum(map(num_bytes, shards(oracle)))
    assert not report["weights"]["is_complete"]


# The command itself -------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(model_id: str, home: Path, **environment: str) -> Iterator[str]:
    """`leyline serve` in a process of its own; yields its address. It logs to a file there."""
    command = [sys.executable, "-m", "leyline", "serve", "--model", model_id, "--port", "0"]
    command += ["--no-progress", "--num-threads", "1", "--kv-cache-tokens", str(NUM_SLOTS)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with open(home / "log", "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            env={**kept, "HF_HOME": str(home), "no_proxy": "*", **environment},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if "ready" in line), "")
        assert ready, "it did not become ready"
        yield ready.split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=READY_S)
    assert process.returncode == 0


def asked(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer to a GET, or to a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=READY_S) as answer:
        return json.load(answer)


@pytest.mark.parametrize("family", ["moonlight-16b-a3b"], indirect=True, scope="module")
def test_the_command_serves_a_hub_id_and_again_offline(
    model_id: str, hub: HubStandIn, tmp_path: Path
) -> None:
    body = {"model": model_id, "messages": [NEXT], "temperature": 0, "max_tokens": 5}
    said = []
    for environment in ({"HF_ENDPOINT": hub.url}, {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1"}):
        before = len(hub.requests)
        with serving(model_id, tmp_path, **environment) as url:
            assert [one["id"] for one in asked(f"{url}/v1/models")["data"]] == [model_id]
            said.append(asked(f"{url}/v1/chat/completions", body)["choices"])
        assert (len(hub.requests) == before) == ("HF_HUB_OFFLINE" in environment)
    assert said[0] == said[1]
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert "the cache has commit" in log and hub.url not in log
