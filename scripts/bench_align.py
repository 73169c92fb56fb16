"""Times `align` on 100,000 tokens: 50 random edits, and inputs made to be hard.

No physical bound but memory: one pass over both inputs is 1.6 MB. Prints a JSON line last.
"""

from __future__ import annotations

import json
import random
import time

from leyline.align import align

LENGTH = 100_000
EDITS = 50
REPEATS = 5

Texts = tuple[list[int], list[int]]


def edited(source: random.Random, alphabet: int) -> Texts:
    """Random tokens, and the same with `EDITS` spans of up to 100 replaced by up to 100 others."""
    old = source.choices(range(alphabet), k=LENGTH)
    new = list(old)
    for start in sorted(source.sample(range(LENGTH), EDITS), reverse=True):
        text = source.choices(range(alphabet), k=source.randint(0, 100))
        new[start : start + source.randint(0, 100)] = text
    return old, new


def shuffled_blocks(source: random.Random, size: int) -> Texts:
    """The same blocks of `size` tokens in another order."""
    blocks = [[size * start + k for k in range(size)] for start in range(LENGTH // size)]
    mixed = source.sample(blocks, len(blocks))
    return [t for block in blocks for t in block], [t for block in mixed for t in block]


def replaced_every(source: random.Random, step: int, length: int) -> Texts:
    """A span of `length` tokens in every `step` is new: as many edits as fit."""
    old = source.choices(range(30_000), k=LENGTH)
    fresh = source.choices(range(30_000), k=LENGTH)
    return old, [fresh[i] if i % step < length else old[i] for i in range(LENGTH)]


def de_bruijn(source: random.Random, order: int = 16) -> list[int]:
    """Two-token text in which every gram of `order` tokens occurs once, by a random walk (Fleury
    replaced by Hierholzer): two of them share all grams, in unlike order.
    """
    mask = (1 << (order - 1)) - 1
    edges = {node: source.sample([0, 1], 2) for node in range(mask + 1)}
    stack, circuit = [0], list[int]()
    while stack:
        if edges[stack[-1]]:
            stack.append(((stack[-1] << 1) & mask) | edges[stack[-1]].pop())
        else:
            circuit.append(stack.pop() & 1)
    return circuit[::-1]


def cases() -> dict[str, Texts]:
    """Every input, by name."""
    source = random.Random(0)
    words = source.choices(range(30_000), k=LENGTH)
    page = source.choices(range(30_000), k=1_000)
    return {
        "edits": edited(source, 30_000),
        "edits_two_tokens": edited(source, 2),
        "unrelated": (words, source.choices(range(30_000), k=LENGTH)),
        "unrelated_two_tokens": (
            source.choices(range(2), k=LENGTH),
            source.choices(range(2), k=LENGTH),
        ),
        "reversed": (words, words[::-1]),
        "all_equal": ([7] * LENGTH, [7] * (LENGTH // 2)),
        "all_equal_framed": ([1, *[7] * LENGTH, 2], [3, *[7] * (LENGTH // 2), 4]),
        "alternating": ([0, 1] * (LENGTH // 2), [1, 0] * (LENGTH // 2) + [1, 1]),
        "one_page_repeated": (page * 100, [5, *page[10:] * 100]),
        "shuffled_16": shuffled_blocks(source, 16),
        "shuffled_1000": shuffled_blocks(source, 1_000),
        "edit_every_40": replaced_every(source, 40, 20),
        "de_bruijn": (de_bruijn(source), de_bruijn(source)),
    }


def measure(texts: Texts) -> dict[str, float]:
    """Best time in milliseconds, and what share of the new tokens was kept."""
    old, new = texts
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        directives = align(old, new)
        best = min(best, time.perf_counter() - began)
    inserted = sum(len(directive.replacement) for directive in directives)
    return {
        "ms": round(1000 * best, 1),
        "directives": len(directives),
        "kept": round(1 - inserted / len(new), 4),
    }


def main() -> None:
    """Measure every case."""
    results = {}
    for name, texts in cases().items():
        results[name] = measure(texts)
        print(f"{name:24} {results[name]}")
    print(json.dumps({"align_100000_tokens_50_edits_ms": results["edits"]["ms"], "cases": results}))


if __name__ == "__main__":
    main()
