"""The whole way, over HTTP with a real engine: talk, splice, go on with an unedited history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from leyline import Engine
from tests.hand_cache import HandCache
from tests.lockstep import TOLERANCE, record, relative_error
from tests.tiny_models import load_oracle

Folder = Callable[[str], Path]
TOOL = "the weather in the land is 17 and rainy, the wind is north, and all is well in there"
STUB = "[evicted]"
ASK = {"role": "user", "content": f"look: ({TOOL}) what now?"}
NEXT = {"role": "user", "content": "and then?"}


def chat(client: TestClient, messages: list[dict[str, str]]) -> dict[str, Any]:
    """A greedy turn of the session "s"."""
    body = {"session_id": "s", "messages": messages, "temperature": 0, "max_tokens": 4}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_unedited_history_goes_on_from_the_splice(
    engine: Engine, client: TestClient, tiny_folder: Folder
) -> None:
    recording = record(engine)
    said = chat(client, [ASK])["choices"][0]["message"]
    tokens = client.get("/v1/sessions/s?tokens=true").json()["token_ids"]
    ((start, end),) = engine.tokenizer.find(tokens, TOOL)
    edit = {"start": start, "end": end, "replacement": STUB, "mode": "amortize"}
    result = client.post("/v1/directives", json={"session_id": "s", "directives": [edit]}).json()
    (receipt,) = result["receipts"]
    assert receipt["mode_done"] == "amortize" and receipt["moved_in_place"] == receipt["kept"] > 20
    length = result["context_length"]["after"]

    first = len(recording.samples)
    answer = chat(client, [ASK, said, NEXT])
    usage = answer["usage"]
    after = client.get("/v1/sessions/s?tokens=true").json()
    context = after["token_ids"][: usage["prompt_tokens"]]
    assert after["pieces"][1] == {"start": start + len(STUB), "end": length - 1, "exact": False}
    details = usage["prompt_tokens_details"]
    assert details["cached_tokens"] == length - 1, "all but the last token, which had no row yet"
    assert details["spliced_tokens"] == receipt["kept"]
    assert answer["session"] == {"id": "s", "version": 1}

    hand = HandCache(load_oracle(tiny_folder("v2_yarn")), list(tokens))
    hand.compute(len(tokens) - 1)
    hand.edit([(start, end, engine.tokenizer.encode_plain(STUB), "amortize")])
    assert context[:length] == hand.tokens
    hand.tokens = list(context)
    expected = hand.compute()[-1]
    assert relative_error(recording.samples[first].logits, expected) < TOLERANCE
    honest = HandCache(hand.model, list(context)).compute()[-1]
    assert relative_error(recording.samples[first].logits, honest) > 10 * TOLERANCE
