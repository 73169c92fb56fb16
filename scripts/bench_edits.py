"""What an agent's edited history costs: the same 12 turns with edit modes forget, amortize, heal.

An agent talks to the embedded model as agents do: a system prompt of about 2,000 tokens whose
first line is today's date, a task, then turn by turn a tool result of about 200 tokens and a
short answer. It sends its whole history every time. Before each turn it changes the date and
clears tool results older than two turns. It knows nothing of directives: it names a session, and
the engine works out what has changed.

Counted are the prompt tokens that had to be computed, as `usage` reports them, from the second
turn on, and the time to the first token. With forget, a changed date means computing everything
behind it. The least that any engine could compute is what the client changed or added; that is
counted beside it, from the histories alone.

    python scripts/bench_edits.py [--turns 12]

The last line is JSON; `recomputed_amortize_over_forget` is the ratio of the computed tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field

from tqdm import tqdm

from leyline import Engine, SamplingParams
from leyline.align import align
from leyline.events import Completion, Delta, Usage

SYSTEM_TOKENS = 2000
TOOL_TOKENS = 200
KEPT_RESULTS = 2
STUB = "[an older tool result was cleared]"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
MODES = ("forget", "amortize", "heal")

Message = dict[str, str]


@dataclass
class Arm:
    """What one mode's conversation came to."""

    usages: list[Usage] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    changed: int = 0

    @property
    def computed(self) -> int:
        """Prompt tokens computed from the second turn on."""
        return sum(usage.recomputed_tokens for usage in self.usages[1:])

    @property
    def prompt(self) -> int:
        """Prompt tokens from the second turn on."""
        return sum(usage.prompt_tokens for usage in self.usages[1:])

    @property
    def spliced(self) -> int:
        """Those of them that were carried over."""
        return sum(usage.spliced_tokens for usage in self.usages[1:])


def filler(label: str, num_tokens: int, engine: Engine) -> str:
    """Ordinary looking text of about that many tokens, different in every line."""
    text, line = "", 0
    while len(engine.tokenizer.encode(text)) < num_tokens:
        line += 1
        text += f"{label}, item {line}: checked in {7 * line} ms, nothing new to report.\n"
    return text


def system(day: int, rules: str) -> Message:
    """The system prompt of a day."""
    return {"role": "system", "content": f"Today is 2026-11-{day:02}.\n{rules}"}


def cleared(history: list[Message]) -> list[Message]:
    """The history without tool results older than two turns."""
    results = [at for at, message in enumerate(history) if message["role"] == "tool"]
    old = set(results[:-KEPT_RESULTS])
    return [
        {**message, "content": STUB} if at in old else message for at, message in enumerate(history)
    ]


def converse(engine: Engine, mode: str, num_turns: int) -> Arm:
    """Hold the conversation in one mode."""
    arm, rules = Arm(), filler("Rule", SYSTEM_TOKENS, engine)
    history: list[Message] = [{"role": "user", "content": f"Find the fault. Run {mode}."}]
    sent: list[int] = []
    for turn in tqdm(range(num_turns), desc=mode, unit="turn"):
        result = filler(f"Result {turn}", TOOL_TOKENS, engine)
        history = cleared([*history, {"role": "tool", "content": result}])
        messages = [system(turn + 1, rules), *history]
        ids = engine.tokenizer.encode(engine.tokenizer.render(messages))
        arm.changed += sum(len(d.replacement) for d in align(sent, ids)) if sent else 0
        completion, first_ms = answer(engine, messages, mode)
        arm.usages.append(completion.usage)
        arm.first_token_ms.append(first_ms)
        history.append({"role": "assistant", "content": completion.text})
        sent = [*ids, *completion.token_ids]
        engine.settle()
    return arm


def answer(engine: Engine, messages: list[Message], mode: str) -> tuple[Completion, float]:
    """One turn, and the milliseconds to its first text."""
    begun, first_ms = time.perf_counter(), None
    for event in engine.turn(messages, GREEDY, {}, f"agent-{mode}", mode):
        if first_ms is None and isinstance(event, Delta):
            first_ms = 1e3 * (time.perf_counter() - begun)
        if isinstance(event, Completion):
            return event, first_ms or 1e3 * (time.perf_counter() - begun)
    raise AssertionError("a turn ended without a completion")


def table(arms: dict[str, Arm]) -> str:
    """One line a mode."""
    lines = [f"{'':10}{'prompt':>10}{'computed':>10}{'spliced':>10}{'first token, mean':>20}"]
    for mode, arm in arms.items():
        mean_ms = sum(arm.first_token_ms[1:]) / (len(arm.first_token_ms) - 1)
        lines.append(f"{mode:10}{arm.prompt:10}{arm.computed:10}{arm.spliced:10}{mean_ms:17.1f} ms")
    lines.append(f"{'at least':10}{'':10}{min(arm.changed for arm in arms.values()):10}")
    return "\n".join(lines)


def main() -> None:
    """Run all modes and print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=12, help="turns of the conversation, from 2")
    num_turns = max(2, parser.parse_args().turns)
    with Engine() as engine:
        arms = {mode: converse(engine, mode, num_turns) for mode in MODES}
    print(table(arms))
    forget, amortize, heal = (arms[mode] for mode in MODES)
    print(
        json.dumps(
            {
                "turns": num_turns,
                "forget_computed": forget.computed,
                "amortize_computed": amortize.computed,
                "heal_computed": heal.computed,
                "changed_or_added": amortize.changed,
                "recomputed_amortize_over_forget": round(amortize.computed / forget.computed, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
