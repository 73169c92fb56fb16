"""What an edit near the start of a conversation costs: AMORTIZE against FORGET, in one run.

A conversation of about 1,500 tokens on the embedded model holds a 600-token tool output near its
start. The output is replaced by a 10-token stub, the client says something more, and the clock
stops at the first token of the answer. FORGET computes everything behind the stub again; AMORTIZE
turns its rows in place. Both arms run alternately, each on a conversation that the cache has
never seen.

Beside them stands what this machine could do at best: the products of a re-prefill at the rate of
a large bf16 product, and the turned bytes at the rate of a copy, both measured in this run.

    python scripts/bench_splice.py [--repeats 7]

The last line is JSON; its `amortize_over_forget_ttft` is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass

import torch

from leyline import Directive, Engine, Mode, SamplingParams
from leyline.events import Completion, EditResult
from leyline.model.parameters import parameter_shapes

TOOL_TOKENS = 600
STUB_TOKENS = 10
CONTEXT_TOKENS = 1500
NEXT_MESSAGE = "Thank you. Which of the two files did I ask about first?"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@dataclass(frozen=True)
class Sample:
    """One measured turn: milliseconds, and what the receipt and the usage say."""

    edit_ms: float
    turn_ms: float
    edit: EditResult
    completion: Completion

    @property
    def ttft_ms(self) -> float:
        """From asking for the edit to the first token of the next answer."""
        return self.edit_ms + self.turn_ms


def filler(label: str, num_tokens: int, engine: Engine) -> str:
    """Ordinary looking text of about that many tokens, different for each label."""
    text, line = "", 0
    while len(engine.tokenizer.encode(text)) < num_tokens:
        line += 1
        text += f"{label} entry {line}: checked the file, found nothing new to report.\n"
    return text


def conversation(label: str, engine: Engine) -> list[dict[str, str]]:
    """Messages with a long tool output in the first turn."""
    tool = filler(f"Log {label}", TOOL_TOKENS + 20, engine)
    behind = CONTEXT_TOKENS - TOOL_TOKENS - 130
    return [
        {"role": "user", "content": f"Session {label}. Please read this log:\n{tool}"},
        {"role": "assistant", "content": "I have read it. What would you like to know?"},
        {"role": "user", "content": "Here are my notes:\n" + filler("Note", behind, engine)},
    ]


def first_token(engine: Engine, messages: list[dict[str, str]], session_id: str) -> Completion:
    """Run a turn of one token: its time is the time to first token."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    *_, last = engine.turn(messages, params, {}, session_id)
    assert isinstance(last, Completion)
    return last


def measure(engine: Engine, mode: Mode, label: str) -> Sample:
    """Prefill a fresh conversation, edit it, and take the next turn."""
    messages = conversation(label, engine)
    reply = first_token(engine, messages, label)
    start, _ = engine.tokenizer.find(engine.session_info(label).token_ids, f"Log {label} entry")[0]
    stub = engine.tokenizer.encode_plain("[evicted: an older tool output was here] " * 4)
    edit = Directive(start, start + TOOL_TOKENS, tuple(stub[:STUB_TOKENS]), mode)
    begun = time.perf_counter()
    result = engine.edit(label, [edit])
    edited = time.perf_counter()
    said = {"role": "assistant", "content": reply.text}
    asked = {"role": "user", "content": NEXT_MESSAGE}
    completion = first_token(engine, [*messages, said, asked], label)
    ended = time.perf_counter()
    return Sample(1e3 * (edited - begun), 1e3 * (ended - edited), result, completion)


def rates() -> tuple[float, float]:
    """Multiply-adds a second of a large bf16 product, and bytes a second of a copy."""
    left, right = torch.randn(1024, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    source, target = torch.empty(2, 1 << 26, dtype=torch.uint8).fill_(1)
    product_s = min(_seconds(lambda: left @ right) for _ in range(10))
    copy_s = min(_seconds(lambda: target.copy_(source)) for _ in range(10))
    return 1024 * 2048 * 2048 / product_s, 2 * len(source) / copy_s


def _seconds(run: object) -> float:
    begun = time.perf_counter()
    run()  # type: ignore[operator]
    return time.perf_counter() - begun


def bounds_ms(engine: Engine, forget: Sample, amortize: Sample) -> dict[str, float]:
    """The least that each arm could take here, from the weights read and the rows touched."""
    multiply_adds, bytes_s = rates()
    shape = engine.parts.executor.model.config
    weights = sum(math.prod(dimensions) for _, dimensions in parameter_shapes(shape))
    computed = {"forget": forget, "amortize": amortize}
    rows = {
        name: sum(receipt.recomputed + receipt.inserted for receipt in sample.edit.receipts)
        + sample.completion.usage.prompt_tokens
        - sample.completion.usage.cached_tokens
        for name, sample in computed.items()
    }
    band = engine.parts.cache.kpe
    turned = sum(r.moved_in_place for r in amortize.edit.receipts)
    turn_s = 2 * turned * shape.num_hidden_layers * band.shape[2] * band.element_size() / bytes_s
    # Two forward passes, for the stub and for the next message; each reads every bf16 weight.
    read_s = 2 * (2 * weights / bytes_s)
    return {
        "forget": 1e3 * (rows["forget"] * weights / multiply_adds),
        "amortize": 1e3 * (max(rows["amortize"] * weights / multiply_adds, read_s) + turn_s),
    }


def table(samples: dict[Mode, list[Sample]], bounds: dict[str, float]) -> str:
    """Medians, one line an arm."""
    lines = [f"{'':10}{'edit':>10}{'next turn':>12}{'to first token':>16}{'at best':>10}  computed"]
    for mode, runs in samples.items():
        medians = [
            statistics.median(getattr(run, name) for run in runs)
            for name in ("edit_ms", "turn_ms", "ttft_ms")
        ]
        receipt, usage = runs[0].edit.receipts[0], runs[0].completion.usage
        computed = receipt.recomputed + receipt.inserted + usage.prompt_tokens - usage.cached_tokens
        lines.append(
            f"{mode.value:10}{medians[0]:7.1f} ms{medians[1]:9.1f} ms{medians[2]:13.1f} ms"
            f"{bounds[mode.value]:7.1f} ms  {computed} of {usage.prompt_tokens} tokens"
        )
    return "\n".join(lines)


def main() -> None:
    """Run both arms and print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="measured turns an arm")
    repeats = parser.parse_args().repeats
    samples: dict[Mode, list[Sample]] = {Mode.AMORTIZE: [], Mode.FORGET: []}
    with Engine() as engine:
        for mode in samples:
            measure(engine, mode, f"warm-{mode.value}")
        for repeat in range(repeats):
            for mode, runs in samples.items():
                runs.append(measure(engine, mode, f"{mode.value}-{repeat}"))
        bounds = bounds_ms(engine, samples[Mode.FORGET][0], samples[Mode.AMORTIZE][0])
    print(table(samples, bounds))
    ttft = {m.value: statistics.median(s.ttft_ms for s in runs) for m, runs in samples.items()}
    print(
        json.dumps(
            {
                "amortize_ttft_ms": round(ttft["amortize"], 2),
                "forget_ttft_ms": round(ttft["forget"], 2),
                "amortize_bound_ms": round(bounds["amortize"], 2),
                "forget_bound_ms": round(bounds["forget"], 2),
                "repeats": repeats,
                "amortize_over_forget_ttft": round(ttft["amortize"] / ttft["forget"], 4),
            }
        )
    )


if __name__ == "__main__":
    main()
