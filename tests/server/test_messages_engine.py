"""The Messages API over a real engine: what is cleared of a history becomes a session's edit."""

from __future__ import annotations

import json
from typing import Any

from fastapi.testclient import TestClient

from .messages_scripts import PATH

WEATHER = "the weather in the land is 17 and rainy, the wind is north, and all is well in there"
NONE_KEPT = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 0},
    "keep": {"type": "tool_uses", "value": 0},
}


def turn(client: TestClient, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """A greedy turn of the session "s", with edits that carry rows over."""
    body = {"session_id": "s", "temperature": 0, "max_tokens": 4, "edit_mode": "amortize"}
    answer = client.post(PATH, json={**body, "messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def history(said: list[Any]) -> list[Any]:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": WEATHER}
    return [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "text", "text": "i look"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "what now?"}]},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and then?"},
    ]


def test_a_cleared_result_is_an_edit_whose_rows_are_carried_over(client: TestClient) -> None:
    first = turn(client, history([])[:3])
    assert "context_management" not in first and first["session"]["version"] == 0
    messages = history(first["content"])
    managed = {"edits": [NONE_KEPT]}
    second = turn(client, messages, context_management=managed)
    (applied,) = second["context_management"]["applied_edits"]
    assert applied["cleared_tool_uses"] == 1 and applied["cleared_input_tokens"] > 20
    receipts = second["session"]["receipts"]
    assert {receipt["mode_done"] for receipt in receipts} == {"amortize"}
    assert sum(receipt["removed"] - receipt["inserted"] for receipt in receipts) > 20
    usage = second["usage"]
    assert usage["spliced_tokens"] > 0 and usage["state"] == "spliced"
    assert usage["cache_read_input_tokens"] >= usage["spliced_tokens"]
    body = {"messages": messages, "context_management": managed}
    counted = client.post(PATH + "/count_tokens", json=body)
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json()["input_tokens"] == total


def test_a_stream_of_the_same_turns_says_the_same(client: TestClient) -> None:
    whole = turn(client, history([])[:3])
    body = {"messages": history([])[:3], "max_tokens": 4, "temperature": 0, "stream": True}
    lines = client.post(PATH, json=body).text.split("\n")
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    deltas = [one["delta"] for one in told if one["type"] == "content_block_delta"]
    texts = [block["text"] for block in whole["content"]]
    assert "".join(delta["text"] for delta in deltas) == "".join(texts)
    closing = told[-2]
    assert closing["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert closing["delta"]["stop_reason"] == whole["stop_reason"]
