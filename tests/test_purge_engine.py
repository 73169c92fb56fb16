"""FORGET with the scope of the cache: afterwards no slot of any tensor knows the text.

What is asked is asked of the raw tensors. Every row that was computed with the secret in view is
copied before the purge; afterwards no slot may hold one of them, and whatever is free is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leyline import Engine, SamplingParams
from leyline.context import Context
from leyline.conversation import Conversation
from leyline.errors import DirectiveError
from leyline.events import EditResult, Purged
from leyline.pointing import Change, Target
from tests.engine_state import assert_at_rest
from tests.probes import (
    drain,
    evict_everything,
    free_slots,
    free_slots_are_zero,
    latents_left,
    plain_engine,
    rows_of,
    same_rows,
    slots_of,
)

Folder = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SECRET = "4711-8899"
AHEAD = "look at this in the land: "
BEHIND = " and that is all that there is in the end, said the man in the hat"
TOLD = f"{AHEAD}{SECRET}{BEHIND}"
HISTORY = [{"role": "user", "content": TOLD}]
INNOCENT = [{"role": "user", "content": f"{AHEAD}nothing{BEHIND}"}]


@pytest.fixture
def engine(tiny_folder: Folder) -> Iterator[Engine]:
    with plain_engine(tiny_folder("v3"), max_num_batched_tokens=16) as engine:
        yield engine


@dataclass
class Witness:
    """Copies of rows that saw the secret, gathered before they are purged.

    Attributes:
        engine: Whose they are.
        chats: The conversations of its sessions, as their clients know them.
        tainted: Latents and bands by what they were found under.
    """

    engine: Engine
    chats: dict[str, Conversation] = field(default_factory=dict)
    tainted: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def note(self, name: str, context: Context, length: int | None = None) -> None:
        """Copy a context's rows from the secret on, or from its first graft on."""
        spans = self.engine.tokenizer.find(context.tokens, SECRET)
        first = spans[0][0] if spans else context.first_graft()
        rows = rows_of(self.engine, context.prefix(first + length) if length else context)
        self.tainted[name] = rows[0][:, first:], rows[1][:, first:]
        assert self.tainted[name][0].shape[1] > 10, "rows that saw the secret"

    def left(self) -> dict[str, int]:
        """How many of each are in any slot still that is not another tenant's."""
        tree = self.engine.parts.scheduler.prefix.tree
        others = [node for root in tree.roots if root for node in tree.below(tree.roots[root])]
        spared = frozenset(slot for node in others for slot in node.slots.tolist())
        counts = {
            name: latents_left(self.engine, rows, spared) for name, rows in self.tainted.items()
        }
        return {name: count for name, count in counts.items() if count}


def session_context(engine: Engine, name: str, salt_root: bytes = b"") -> Context:
    return engine.sessions.get(name, salt_root).context


def crowd(engine: Engine) -> Witness:
    """Everything that may hold a row that saw the secret.

    A session "s" that was told it; "fork" with the same history; "spliced", which was told it and
    cut it out, so that its grafts carry it; "kept", which has it in a kept version only; a
    completion without a session; and another tenant with the same text.
    """
    witness = Witness(engine)
    chats = witness.chats
    for name in ("s", "fork", "spliced", "kept"):
        chats[name] = engine.session(name)
        chats[name].chat(TOLD, GREEDY)
    chats["fork"].chat("go on", GREEDY)
    chats["spliced"].replace(SECRET, "", "amortize")
    chats["spliced"].chat("go on", GREEDY)
    chats["kept"].replace(SECRET, "gone", "forget")
    engine.generate(f"{TOLD} once more", GREEDY)
    turn = engine.submit_chat(HISTORY, GREEDY, session_id="s", salt="tenant")
    assert turn in drain(engine)
    for name in ("s", "fork"):
        witness.note(name, session_context(engine, name))
    spliced = session_context(engine, "spliced")
    assert engine.parts.scheduler.prefix.resident(spliced) >= len(spliced) - 1
    witness.note("spliced", spliced)
    witness.note("version", engine.sessions.get("kept").versions[-1].context)
    plain = engine.tokenizer.encode(f"{TOLD} once more", bos=True)
    witness.note("completion", Context.of(plain))
    return witness


def purge(engine: Engine, name: str = "s") -> Purged:
    result = engine.session(name).replace(SECRET, "", "forget", scope="cache")
    assert result.purged is not None
    return result.purged


def test_after_a_purge_no_slot_holds_a_row_that_saw_the_secret(engine: Engine) -> None:
    witness = crowd(engine)
    assert set(witness.left()) == {"s", "fork", "spliced", "version", "completion"}
    assert engine.find_in_cache(SECRET).rows > 100
    purged = purge(engine)
    assert witness.left() == {}
    assert free_slots_are_zero(engine)
    assert purged.rows > 100
    assert purged.slots >= len(free_slots(engine)), "s has computed its own text again since"
    assert purged.degraded == ("spliced",)
    assert purged.still_held == ("fork",)
    assert purged.versions >= 2, "that of s itself, and those of the others"
    found = engine.find_in_cache(SECRET)
    assert (found.rows, found.sessions) == (0, ("fork",))
    assert_at_rest(engine)


@pytest.mark.parametrize("mode", ["forget", "amortize"])
def test_the_scope_of_the_context_leaves_such_rows(engine: Engine, mode: str) -> None:
    witness = crowd(engine)
    result = engine.session("s").replace(SECRET, "", mode)
    assert result.purged is None
    assert {"fork", "spliced", "completion"} <= set(witness.left())
    assert engine.find_in_cache(SECRET).rows > 100


def test_evicted_rows_are_still_there_until_a_purge_scrubs_them(engine: Engine) -> None:
    witness = crowd(engine)
    evict_everything(engine)
    assert engine.find_in_cache(SECRET).rows == 0
    assert "completion" in witness.left(), "in slots that are free"
    assert not free_slots_are_zero(engine)
    purge(engine)
    assert witness.left() == {} and free_slots_are_zero(engine)


def test_the_old_prompt_finds_only_what_stands_before_the_secret(engine: Engine) -> None:
    crowd(engine)
    prompt = engine.tokenizer.encode(engine.tokenizer.render(HISTORY))
    assert engine.chat(HISTORY, GREEDY).usage.cached_tokens == len(prompt) - 1
    purge(engine)
    usage = engine.chat(HISTORY, GREEDY).usage
    ahead = engine.tokenizer.find(prompt, SECRET)[0][0]
    assert usage.cached_tokens == ahead
    innocent = engine.chat(INNOCENT, GREEDY).usage
    assert innocent.cached_tokens == ahead


def test_another_tenant_keeps_its_rows(engine: Engine) -> None:
    crowd(engine)
    root = next(s.context.root for s in engine.sessions if s.context.root)
    context = engine.sessions.get("s", root).context
    slots, rows = slots_of(engine, context), rows_of(engine, context)
    assert len(slots) > 50
    purge(engine)
    assert (slots_of(engine, context) == slots).all()
    assert same_rows(rows_of(engine, context), rows)
    assert engine.find_in_cache(SECRET, salt="tenant").rows > 50
    again = engine.submit_chat(HISTORY, GREEDY, session_id="t", salt="tenant")
    ended = drain(engine)[again]
    assert ended.usage.cached_tokens == ended.usage.prompt_tokens - 1  # pyright: ignore


def test_sessions_go_on_after_a_purge(engine: Engine) -> None:
    crowd(engine)
    purge(engine)
    for name in ("s", "spliced", "kept", "fork"):
        chat = engine.session(name)
        assert chat.info.state == "exact"
        text = chat.text
        engine.edit(name, [Change(Target(match="land"), "sea", "amortize")])
        assert chat.text == text.replace("land", "sea")
    found = engine.find_in_cache(SECRET)
    assert found.sessions == ("fork",)
    assert_at_rest(engine)


def test_kept_versions_that_held_it_are_gone(engine: Engine) -> None:
    crowd(engine)
    assert engine.session_info("kept").versions
    purge(engine)
    for name in ("s", "spliced", "kept"):
        assert not any(
            engine.tokenizer.find(version.context.tokens, SECRET)
            for version in engine.sessions.get(name).versions
        )
        assert engine.sessions.get(name).checkpoint is None or not engine.tokenizer.find(
            engine.sessions.get(name).checkpoint[0].tokens,  # pyright: ignore
            SECRET,
        )


def test_a_purge_while_others_run(engine: Engine) -> None:
    """Requests that run on such rows lose them; those that spell the text compute them anew."""
    chats = crowd(engine).chats
    victim = engine.submit_chat(HISTORY, LONG)
    grafted = engine.submit_chat(
        [*chats["spliced"].messages, {"role": "user", "content": "more"}],
        LONG,
        session_id="spliced",
    )
    bystander = engine.submit_chat(INNOCENT, LONG)
    for _ in range(20):
        engine.step()
    witness = Witness(engine)
    scheduler = engine.parts.scheduler
    assert {victim, grafted, bystander} <= set(scheduler.running)
    for request in (victim, grafted):
        view = scheduler.running[request].view
        context = view.whole()
        spans = engine.tokenizer.find(context.tokens, SECRET)
        first = spans[0][0] if spans else context.first_graft()
        slots = torch.from_numpy(view.table[first : view.coverage.reach].copy())
        cache = engine.parts.cache
        witness.tainted[str(request)] = cache.ckv[:, slots], cache.kpe[:, slots]
    untouched = scheduler.running[bystander].view
    table = untouched.table.copy()
    edit = engine.submit_directives(
        "s", [Change(Target(match=SECRET), "", "forget", scope="cache")]
    )
    while engine.session_info("s").version == 0:
        engine.step()
    # Nothing has been computed since: the purge happens in the very step that commits the edit.
    assert witness.left() == {} and free_slots_are_zero(engine)
    assert engine.find_in_cache(SECRET).rows == 0
    assert scheduler.find(victim) is not None and scheduler.find(grafted) is not None
    assert bystander in scheduler.running
    assert (scheduler.running[bystander].view.table[: len(table)] == table).all()
    ended = drain(engine)
    purged = ended[edit].purged  # pyright: ignore
    assert purged is not None and purged.sequences >= 2
    assert ended[grafted].usage.degraded  # pyright: ignore
    assert ended[grafted].usage.state == "exact"  # pyright: ignore
    assert not ended[bystander].usage.degraded  # pyright: ignore
    assert_at_rest(engine)


def test_a_purge_of_what_the_running_turn_of_its_own_session_says(engine: Engine) -> None:
    chat = engine.session("s")
    turn = engine.submit_chat(HISTORY, LONG, session_id="s")
    for _ in range(12):
        engine.step()
    work = engine.parts.scheduler.running[turn]
    slots = torch.from_numpy(work.view.table[: work.view.coverage.reach].copy())
    first = engine.tokenizer.find(work.view.whole().tokens, SECRET)[0][0]
    cache, witness = engine.parts.cache, Witness(engine)
    witness.tainted["turn"] = cache.ckv[:, slots[first:]], cache.kpe[:, slots[first:]]
    edit = engine.submit_directives(
        "s", [Change(Target(match=SECRET), "X", "forget", scope="cache")]
    )
    ended = drain(engine)
    result = ended[edit]
    assert isinstance(result, EditResult) and result.purged is not None
    assert witness.left() == {}
    assert f"{AHEAD}X{BEHIND}" in chat.text
    assert engine.find_in_cache(SECRET) == engine.find_in_cache("never said by anybody")


def test_an_edit_that_is_putting_it_in_is_found_and_begins_anew(engine: Engine) -> None:
    chat, other = engine.session("s"), engine.session("other")
    chat.chat(TOLD, GREEDY)
    other.chat("look at the sea, " * 3 + "and so on", GREEDY)
    chat.replace(SECRET, "", "forget", scope="cache")
    assert engine.find_in_cache(SECRET).rows == 0
    text = f"{SECRET} is the word, and there is no other word in the land for it"
    edit = engine.submit_directives("other", [Change(Target(match="so on"), text)])
    engine.step()
    (work,) = engine.parts.scheduler.running.values()
    assert work.splice is not None and len(work.splice.private) == 16
    slots = torch.from_numpy(work.splice.private.copy())
    witness, cache = Witness(engine), engine.parts.cache
    witness.tainted["insert"] = cache.ckv[:, slots], cache.kpe[:, slots]
    assert engine.find_in_cache(SECRET).rows == 16
    engine._reach.purge(b"", SECRET.encode())
    assert work.splice is None and witness.left() == {}
    assert isinstance(drain(engine)[edit], EditResult)
    assert engine.find_in_cache(SECRET).sessions == ("other",), "it was said anew"


def test_the_text_is_found_however_it_was_tokenised(engine: Engine) -> None:
    """The same secret as single bytes, in a prompt of token ids."""
    crowd(engine)
    plain = engine.tokenizer.encode_plain("the inn")
    split = [token for letter in "the inn" for token in engine.tokenizer.encode_plain(letter)]
    assert plain != split
    prompt = [*engine.tokenizer.encode("a word: "), *split, *engine.tokenizer.encode(" and on")]
    engine.generate(prompt, GREEDY)
    chat = engine.session("teller")
    chat.chat("he is in the inn", GREEDY)
    assert engine.generate(prompt, GREEDY).usage.cached_tokens == len(prompt) - 1
    chat.replace("the inn", "it", "forget", scope="cache")
    assert engine.find_in_cache("the inn").rows == 0
    assert engine.find_in_cache(plain).rows == engine.find_in_cache(split).rows == 0
    usage = engine.generate(prompt, GREEDY).usage
    assert usage.cached_tokens == len(engine.tokenizer.encode("a word: "))


def test_shared_rows_carry_the_secret_and_go_too(engine: Engine) -> None:
    """A span that only stood behind the secret, brought into another conversation."""
    crowd(engine)
    other = engine.session("borrower")
    other.chat("tell me about the man", GREEDY)
    source = ("s", Target(match=BEHIND.strip()[:30]))
    result = other.edit([Change(Target(match="about"), source=source)])
    assert result.receipts[0].shared > 20
    witness = Witness(engine)
    witness.note("borrower", session_context(engine, "borrower"), result.receipts[0].shared)
    assert "borrower" in engine.find_in_cache(SECRET).sessions
    purged = purge(engine)
    assert "borrower" in purged.degraded and witness.left() == {}
    assert other.info.state == "exact"


def test_marks_that_would_put_it_back_are_dropped(engine: Engine) -> None:
    crowd(engine)
    chat = engine.session("kept")
    chat.decay(Target(match="gone"), turns=1, replacement=SECRET)
    chat.decay(Target(match="land"), turns=1, replacement="sea")
    chat.replace("look", "see")
    purge(engine)
    assert [engine.tokenizer.decode(mark.replacement) for mark in chat.info.marks] == ["sea"]
    (version,) = engine.sessions.get("kept").versions
    assert len(version.marks) == 1, "nor can the session go back to it"


def test_several_texts_at_once(engine: Engine) -> None:
    crowd(engine)
    changes = [
        Change(Target(match=SECRET), "", "forget", scope="cache"),
        Change(Target(match="the hat"), "", "forget", scope="cache"),
    ]
    result = engine.edit("s", changes)
    assert result.purged is not None and result.purged.rows > 100
    for text in (SECRET, "the hat"):
        assert engine.find_in_cache(text).rows == 0
    assert free_slots_are_zero(engine)


@pytest.mark.parametrize("mode", ["amortize", "heal"])
def test_only_forget_reaches_the_cache(engine: Engine, mode: str) -> None:
    with pytest.raises(DirectiveError, match="forget"):
        Change(Target(match=SECRET), "", mode, scope="cache")


def test_an_empty_span_is_nothing_to_forget(engine: Engine) -> None:
    crowd(engine)
    with pytest.raises(DirectiveError, match="empty"):
        engine.edit("s", [Change(Target(start=5, end=5), "x", "forget", scope="cache")])


def test_finding_nothing_costs_nothing(engine: Engine) -> None:
    assert engine.find_in_cache("never said").rows == 0
    crowd(engine)
    assert engine.find_in_cache("never said") == engine.find_in_cache("nor this")
    assert engine.find_in_cache("never said").sessions == ()
