"""An agent loop that has never heard of Leyline, and what the server saved it.

The loop is the usual one: the OpenAI client, a tool, a growing list of messages that is sent whole
every time. Two things are said about Leyline, once, where the client is made: which session the
conversation is, and that old tool results may be cleared. The server clears them in the context
that the model has already read, and carries what stands behind them along.

    leyline serve                       # in another terminal
    pip install openai
    python examples/agent.py [--url http://127.0.0.1:8000] [--turns 8] [--mode amortize]

Afterwards the server's metrics say how many edits there were and how many prompt tokens had to be
computed; run it with `--mode forget` to see what the same conversation costs without splices.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import urllib.request
import uuid
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "next_page",
        "description": "Read the next page of the log.",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["rpm", "bar"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}
RULES = "".join(
    f"Rule {number}: a fault of kind {number} is told by its code and the hour at which it began. "
    for number in range(1, 40)
)
CLEARING: dict[str, Any] = {
    "edits": [
        {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "input_tokens", "value": 1500},
            "keep": {"type": "tool_uses", "value": 2},
        }
    ]
}
COUNTED = ("prompt_tokens_total", "prompt_tokens_recomputed_total", "prompt_tokens_spliced_total")


def next_page(page: int, unit: str) -> str:
    """The tool: a page of a log, about 300 tokens."""
    return "\n".join(
        f"{page:02}:{line:02} pump {line * page % 7} is at {line * 13} {unit}" for line in range(20)
    )


def run_agent(client: OpenAI, model: str, more: dict[str, Any], turns: int) -> None:
    """The loop: ask, call the tool, tell the result, ask again."""
    messages: list[Any] = [
        {"role": "system", "content": f"You are {more['session_id']}. {RULES}"},
        {"role": "user", "content": "Read the log page by page and say what is wrong."},
    ]
    for turn in range(turns):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=64,
            extra_body=more,
        )
        reply = answer.choices[0].message
        messages.append(reply)
        for call in reply.tool_calls or []:
            assert call.type == "function", "there are no other tools"
            unit = json.loads(call.function.arguments)["unit"]
            page = next_page(turn, unit)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": page})
            print(f"turn {turn + 1}: next_page({unit})", flush=True)


def metrics(url: str) -> dict[str, float]:
    """The server's counters, by name and labels."""
    key = os.environ.get("LEYLINE_API_KEY", "")
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^leyline:(\S+) (\S+)$", text, re.M)}


def main() -> None:
    """Run the loop, and say what the server's metrics say of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--mode", choices=("amortize", "heal", "forget"), default="amortize")
    asked = parser.parse_args()
    key = os.environ.get("LEYLINE_API_KEY", "none")
    client = OpenAI(base_url=f"{asked.url}/v1", api_key=key)
    model = client.models.list().data[0].id
    more = {
        "session_id": f"agent-{uuid.uuid4().hex[:8]}",
        "edit_mode": asked.mode,
        "context_management": CLEARING,
    }
    before = metrics(asked.url)
    run_agent(client, model, more, asked.turns)
    after = metrics(asked.url)
    prompt, computed, spliced = (after[name] - before[name] for name in COUNTED)
    edits = f'directives_total{{mode="{asked.mode}",result="done"}}'
    splices = after[edits] - before[edits]
    print(
        f"\n{splices:.0f} edits carried out; of {prompt:.0f} prompt tokens {computed:.0f} were "
        f"computed and {spliced:.0f} carried along by edits."
    )
    print(json.dumps({"splices": splices, "prefill_saved": round(1 - computed / prompt, 4)}))


if __name__ == "__main__":
    main()
