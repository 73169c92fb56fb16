"""What is asked of a context: compiled for what the context is going to be, or refused for good.

Whatever is refused changes nothing: not the session, not the rows, and not the request that runs
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyline import Directive, Engine, LeylineError, Mode, SamplingParams
from leyline.context import Context
from leyline.directive import MAX_DIRECTIVES, Source
from leyline.editing import Coming, coming, listed
from leyline.errors import (
    ContextLengthError,
    DirectiveError,
    InvalidRequestError,
    MarkNotFoundError,
    QuotaError,
    SessionBusyError,
    SessionNotFoundError,
    VersionConflictError,
    VersionNotFoundError,
)
from leyline.events import Completion, EditResult, EngineEvent
from leyline.pointing import Change, MarkRequest, Target
from tests.engine_state import assert_at_rest, session_rows, state_digest
from tests.lockstep import terminals, tiny_engine

Folder = Callable[[str], Path]
Call = Callable[[Engine], Any]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
TOOL = "17 and rainy in the land"
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "be well in the land"},
    {"role": "user", "content": "is it rainy? rainy or not?"},
    {"role": "tool", "content": TOOL, "tool_call_id": "call-1"},
    {"role": "tool", "content": "second", "tool_call_id": "call-2"},
]
NAN, HUGE = float("nan"), 10**30
WRONG_TEXTS: list[Any] = [None, 5, NAN, b"s", ["s"], {"s": 1}, True, "\ud800", "a\udfffb"]
WRONG_WHOLES: list[Any] = [-1, True, 0.0, NAN, "0", HUGE, [], 2**31]


def drain(engine: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while engine.has_work:
        events += engine.step()
    assert_at_rest(engine)
    return events


def ending(events: list[EngineEvent], request: int) -> Any:
    (last,) = (event for event in terminals(events) if event.request_id == request)
    return last


def make_engine(folder: Path, **options: Any) -> Engine:
    defaults = {"max_model_len": 250, "kv_cache_tokens": 1000, "protect_first": 1}
    engine = tiny_engine(folder, **{**defaults, **options})
    engine.submit_chat(HISTORY, PARAMS, session_id="s")
    engine.submit_chat(HISTORY, PARAMS, session_id="theirs", salt="tenant")
    drain(engine)
    return engine


# -- what is refused ------------------------------------------------------------------------------


class Shop:
    """An engine with an idle session, and another whose turn and edit are under way."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        ask = [{"role": "user", "content": "once in the land"}]
        request = engine.submit_chat(ask, LONG, session_id="alone")
        self.expected = ending(drain(engine), request).text
        self.running = engine.submit_chat(ask, LONG, session_id="busy")
        for _ in range(6):
            engine.step()
        self.digest = state_digest(engine)
        self.rows = session_rows(engine, "alone")


@pytest.fixture(scope="module")
def shop(tiny_folder: Folder) -> Iterator[Shop]:
    with make_engine(tiny_folder("v3")) as engine:
        yield Shop(engine)


def edit(*changes: Any, **more: Any) -> Call:
    return lambda e: e.submit_directives("s", list(changes), **more)


def at(start: Any, end: Any, *more: Any, **named: Any) -> Call:
    return lambda e: e.submit_directives("s", [Directive(start, end, *more, **named)])


def change(target: Any, *more: Any, **named: Any) -> Call:
    return lambda e: e.submit_directives("s", [Change(target, *more, **named)])


def own(engine: Engine) -> Context:
    return engine.sessions.get("s").context


def length(engine: Engine, name: str = "s") -> int:
    return len(engine.sessions.get(name).context)


def given(value: Any) -> Any:
    """A value of a type that a checker would not let through."""
    return value


def taken(engine: Engine, start: int, new: tuple[int, ...]) -> Any:
    """Tokens put in with rows of the session's own context."""
    return at(3, 4, new, source=Source(own(engine), start))(engine)


WHITE = Target(match="\n", occurrence=0)
FAR = Target(3, 999)
Case = tuple[type[LeylineError], Call]
REFUSED: dict[str, Case] = {
    # -- positions
    "a start behind the end": (DirectiveError, at(9, 8)),
    "a span behind the end": (DirectiveError, at(5, 10_000)),
    "a start behind the context": (DirectiveError, at(10_000, 10_001)),
    "a negative start": (DirectiveError, at(-1, 4)),
    "a negative span": (DirectiveError, at(-5, -2)),
    "huge positions": (DirectiveError, at(HUGE, HUGE + 1)),
    "the protected head": (DirectiveError, at(0, 4)),
    "an insertion in front of the protected head": (DirectiveError, at(0, 0, (9,))),
    "overlapping spans": (DirectiveError, edit(Directive(3, 9), Directive(8, 12))),
    "the same span twice": (DirectiveError, edit(Directive(3, 9), Directive(3, 9))),
    "the same span twice, pointed at in two ways": (
        DirectiveError,
        lambda e: e.edit("s", [Change(Target(match=TOOL), "a"), Change(Target(message=2), "b")]),
    ),
    # -- what is put in
    "an id outside the vocabulary": (DirectiveError, at(3, 5, (266,))),
    "a huge id": (DirectiveError, at(3, 5, (HUGE,))),
    "an id outside the vocabulary in a change": (DirectiveError, change(Target(3, 5), [266])),
    "a replacement beyond the window": (ContextLengthError, at(3, 5, (9,) * 500)),
    "a text beyond the window": (ContextLengthError, change(Target(3, 5), "land " * 5000)),
    # -- sets
    "no changes": (DirectiveError, edit()),
    "ten thousand directives": (DirectiveError, edit(*[Directive(3, 3, (9,))] * 10_000)),
    "ten thousand searches": (
        DirectiveError,
        lambda e: e.edit("s", [Change(Target(match="nowhere", occurrence=9), "")] * 10_000),
    ),
    "one too many": (DirectiveError, edit(*[Directive(9, 9)] * (MAX_DIRECTIVES + 1))),
    # -- ways to point
    "a text that is nowhere": (DirectiveError, change(Target(match="snow"))),
    "a text that is there twice": (DirectiveError, change(Target(match="rainy"))),
    "an occurrence too many": (DirectiveError, change(Target(match="rainy", occurrence=3))),
    "an occurrence too few": (DirectiveError, change(Target(match="rainy", occurrence=-4))),
    "a text outside its message": (DirectiveError, change(Target(message=0, match="rainy"))),
    "a message that is not there": (DirectiveError, change(Target(message=99))),
    "a message that is not there from the end": (DirectiveError, change(Target(message=-6))),
    "a call that nothing answers": (DirectiveError, change(Target(tool_call_id="call-9"))),
    "a range behind the end": (DirectiveError, change(Target(5, 10_000))),
    "half a special token": (DirectiveError, change(Target(match="m_end|>\n<|im_start|>tool\n1"))),
    # -- sharing
    "rows of an unknown session": (
        SessionNotFoundError,
        change(Target(3, 4), source=("nobody", Target(1, 2))),
    ),
    "rows of another tenant": (
        SessionNotFoundError,
        change(Target(3, 4), source=("theirs", Target(1, 2))),
    ),
    "rows behind the end": (DirectiveError, change(Target(3, 4), source=("s", Target(1, 999)))),
    "rows of a text that is nowhere": (
        DirectiveError,
        change(Target(3, 4), source=("s", Target(match="snow"))),
    ),
    "rows of another tenant by hand": (
        DirectiveError,
        lambda e: at(3, 4, own(e).tokens[1:3], source=Source(Context.of(own(e).tokens, b"x"), 1))(
            e
        ),
    ),
    "rows of other tokens": (
        DirectiveError,
        lambda e: at(3, 4, (9, 9), source=Source(own(e), 1))(e),
    ),
    "rows behind the end by hand": (
        DirectiveError,
        lambda e: at(3, 4, (9,), source=Source(own(e), 999))(e),
    ),
    "rows at a huge place": (
        DirectiveError,
        lambda e: at(3, 4, (), source=Source(own(e), HUGE))(e),
    ),
    "rows from nowhere": (DirectiveError, lambda e: at(3, 4, (), source=Source(own(e), -1))(e)),
    "rows that are computed": (
        DirectiveError,
        lambda e: at(3, 4, own(e).tokens[1:2], Mode.FORGET, Source(own(e), 1))(e),
    ),
    # -- reach
    "nothing to forget": (DirectiveError, change(Target(5, 5), "", "forget", "cache")),
    "white space to forget": (
        DirectiveError,
        change(WHITE, "", "forget", "cache"),
    ),
    # -- versions
    "another version": (VersionConflictError, edit(Directive(3, 4), expected_version=7)),
    "a version that is not kept": (VersionNotFoundError, lambda e: e.revert("s", 7)),
    "no version to go back to": (VersionNotFoundError, lambda e: e.revert("s")),
    # -- sessions
    "a turn of a busy session": (
        SessionBusyError,
        lambda e: e.submit_chat(HISTORY, PARAMS, session_id="busy"),
    ),
    "going back with a busy session": (SessionBusyError, lambda e: e.revert("busy", 0)),
    "marking a busy session": (
        SessionBusyError,
        lambda e: e.mark("busy", MarkRequest("pin", Target(3, 4))),
    ),
    "beyond the window of a turn that runs": (
        ContextLengthError,
        lambda e: e.submit_directives("busy", [Directive(3, 3, (9,) * 200)]),
    ),
    # -- marks
    "a mark that is none": (DirectiveError, lambda e: e.mark("s", given(Target(3, 4)))),
    "a mark behind the end": (
        DirectiveError,
        lambda e: e.mark("s", MarkRequest("pin", FAR)),
    ),
    "a mark of a text that is nowhere": (
        DirectiveError,
        lambda e: e.mark("s", MarkRequest("scratch", Target(match="snow"))),
    ),
    "a decay of the protected head": (
        DirectiveError,
        lambda e: e.mark("s", MarkRequest("decay", Target(0, 3), turns=1)),
    ),
    "a decay beyond the window": (
        ContextLengthError,
        lambda e: e.mark("s", MarkRequest("decay", Target(3, 4), turns=1, replacement="a " * 999)),
    ),
    "a decay into ids outside the vocabulary": (
        DirectiveError,
        lambda e: e.mark("s", MarkRequest("decay", Target(3, 4), turns=1, replacement=[266])),
    ),
    "a mark that is not there": (MarkNotFoundError, lambda e: e.unmark("s", "mark-0")),
    "a mark of another kind": (MarkNotFoundError, lambda e: e.unmark("s", given(["mark-0"]))),
    # -- chats
    "parameters that are none": (
        InvalidRequestError,
        lambda e: e.submit_chat(HISTORY, given({"temperature": 0}), session_id="new"),
    ),
    "no parameters": (InvalidRequestError, lambda e: e.submit_prompt("a", given(None))),
    "an edit mode that is none": (
        DirectiveError,
        lambda e: e.submit_chat(HISTORY, PARAMS, session_id="s", edit_mode="burn"),
    ),
    "half a surrogate in a history": (
        InvalidRequestError,
        lambda e: e.submit_chat([*HISTORY, {"role": "user", "content": "\ud800"}], PARAMS),
    ),
}


def add(
    what: str, kind: type[LeylineError], values: list[Any], call: Callable[[Any], Call]
) -> None:
    """One case for each value."""
    REFUSED.update({f"{what} {value!r:.20}": (kind, call(value)) for value in values})


add("start", DirectiveError, [None, 3.0, NAN, "3", True, [3], np.int64(3)], lambda v: at(v, 9))
add("end", DirectiveError, [None, 9.0, NAN, "9", True, [9], np.int64(9)], lambda v: at(3, v))
add(
    "replacement",
    DirectiveError,
    ["the", None, 5, NAN, [1.0], [True], [NAN], ["a"], [[1]], [-1], {"a": 1}, (None,), b"", b"ab"],
    lambda v: at(3, 5, v),
)
add("mode", DirectiveError, ["burn", None, 5, NAN, [], "AMORTIZE"], lambda v: at(3, 5, (), v))
add(
    "source",
    DirectiveError,
    ["s", 5, ("s", 3), Source(given("s"), 0)],
    lambda v: at(3, 5, (9,), source=v),
)
add(
    "change",
    DirectiveError,
    [None, 5, (3, 5), {"start": 3}, "the", Target(3, 5), Source(Context(), 0), NAN],
    lambda v: edit(v),
)
add(
    "changes",
    DirectiveError,
    [None, 5, "the", {}, {3: 5}, NAN, Directive(3, 5), iter([Directive(3, 5)])],
    lambda v: lambda e: e.submit_directives("s", v),
)
add(
    "expected version",
    DirectiveError,
    [value for value in WRONG_WHOLES],
    lambda v: edit(Directive(3, 5), expected_version=v),
)
add("version", DirectiveError, WRONG_WHOLES, lambda v: lambda e: e.revert("s", v))
add(
    "key",
    InvalidRequestError,
    ["", "x" * 1000, *WRONG_TEXTS[1:]],
    lambda v: edit(Directive(3, 5), idempotency_key=v),
)
for name, ask in {
    "edit": lambda e, *s, **k: e.submit_directives(*s, [Directive(3, 5)], **k),
    "plan": lambda e, *s, **k: e.plan_directives(*s, [Directive(3, 5)], **k),
    "info": lambda e, *s, **k: e.session_info(*s, **k),
    "delete": lambda e, *s, **k: e.delete_session(*s, **k),
    "revert": lambda e, *s, **k: e.revert(*s, **k),
    "mark": lambda e, *s, **k: e.mark(*s, MarkRequest("pin", Target(3, 4)), **k),
    "unmark": lambda e, *s, **k: e.unmark(*s, "mark-0", **k),
}.items():
    REFUSED[f"{name}: an unknown session"] = (SessionNotFoundError, lambda e, a=ask: a(e, "nobody"))
    REFUSED[f"{name}: a session of another tenant"] = (
        SessionNotFoundError,
        lambda e, a=ask: a(e, "theirs"),
    )
    REFUSED[f"{name}: the wrong salt"] = (
        SessionNotFoundError,
        lambda e, a=ask: a(e, "s", salt="other"),
    )
    add(
        f"{name}: session",
        InvalidRequestError,
        ["", "x" * 1000, *WRONG_TEXTS],
        lambda v, a=ask: lambda e: a(e, v),
    )
    add(
        f"{name}: salt",
        InvalidRequestError,
        WRONG_TEXTS,
        lambda v, a=ask: lambda e: a(e, "s", salt=v),
    )
add(
    "chat: session",
    InvalidRequestError,
    ["", "x" * 1000, *WRONG_TEXTS[1:]],
    lambda v: lambda e: e.submit_chat(HISTORY, PARAMS, session_id=v),
)
add(
    "chat: salt",
    InvalidRequestError,
    WRONG_TEXTS,
    lambda v: lambda e: e.submit_chat(HISTORY, PARAMS, session_id="new", salt=v),
)
add(
    "prompt: salt",
    InvalidRequestError,
    WRONG_TEXTS,
    lambda v: lambda e: e.submit_prompt("a", PARAMS, salt=v),
)
add(
    "chat: messages",
    InvalidRequestError,
    [None, 5, NAN, "the", {}, [None], [5], [["user", "a"]], [{"content": "a"}], [{}]],
    lambda v: lambda e: e.submit_chat(v, PARAMS, session_id="s"),
)
add(
    "find",
    InvalidRequestError,
    [None, 5, NAN, "", "  ", [], [266], [-1], [HUGE], [1.0], ["a"], {}, b"a", "\ud800"],
    lambda v: lambda e: e.find_in_cache(v),
)
add(
    "find: salt", InvalidRequestError, WRONG_TEXTS, lambda v: lambda e: e.find_in_cache("a", salt=v)
)
add("list: salt", InvalidRequestError, WRONG_TEXTS, lambda v: lambda e: e.sessions_info(salt=v))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(shop: Shop, case: str) -> None:
    kind, call = REFUSED[case]
    before, shop.digest = shop.digest, ""
    try:
        with pytest.raises(LeylineError) as caught:
            call(shop.engine)
    finally:
        shop.digest = state_digest(shop.engine)
    assert shop.digest == before
    assert type(caught.value) is kind
    assert 15 < len(caught.value.message) < 1000
    assert caught.value.status < 500
    assert session_rows(shop.engine, "alone") == shop.rows


@pytest.mark.parametrize(
    "make",
    [
        lambda: Target(),
        lambda: Target(3, 5, match="a"),
        lambda: Target(3),
        lambda: Target(NAN, 5),  # pyright: ignore
        lambda: Target(match=""),
        lambda: Target(match="\ud800"),
        lambda: Target(match="a", occurrence=NAN),  # pyright: ignore
        lambda: Target(message=HUGE),
        lambda: Change("a"),  # pyright: ignore
        lambda: Change(Target(3, 5), NAN),  # pyright: ignore
        lambda: Change(Target(3, 5), "\ud800"),
        lambda: Change(Target(3, 5), [HUGE]),
        lambda: Change(Target(3, 5), "", "burn"),
        lambda: Change(Target(3, 5), "", "amortize", "cache"),
        lambda: Change(Target(3, 5), "", "forget", "world"),  # pyright: ignore
        lambda: Change(Target(3, 5), source="s"),  # pyright: ignore
        lambda: Change(Target(3, 5), source=("\ud800", Target(3, 5))),
        lambda: Change(Target(3, 5), "a", source=("s", Target(3, 5))),
        lambda: MarkRequest("pin", Target(3, 5), ttl_s=NAN),
        lambda: MarkRequest("pin", Target(3, 5), ttl_s=-1),
        lambda: MarkRequest("pin", Target(3, 5), ttl_s=float("inf")),
        lambda: MarkRequest("decay", Target(3, 5), turns=0),
        lambda: MarkRequest("decay", Target(3, 5), turns=HUGE),
        lambda: MarkRequest("glue", Target(3, 5)),  # pyright: ignore
        lambda: MarkRequest("scratch", None, of="dreams"),  # pyright: ignore
    ],
)
def test_what_is_malformed_cannot_even_be_made(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert len(caught.value.message) > 15 and caught.value.status in (400, 422)


def test_after_all_that_the_turn_ends_as_if_it_had_been_alone(shop: Shop) -> None:
    assert ending(drain(shop.engine), shop.running).text == shop.expected
    assert state_digest(shop.engine) != shop.digest


def test_a_context_is_never_left_empty(tiny_folder: Folder) -> None:
    with make_engine(tiny_folder("v3"), protect_first=0) as engine:
        digest, whole = state_digest(engine), length(engine)
        for changes in (
            [Directive(0, whole)],
            [Directive(0, whole, (), Mode.FORGET)],
            [Directive(0, 5), Directive(5, whole)],
            [Change(Target(0, whole), "")],
        ):
            with pytest.raises(DirectiveError, match="empty"):
                engine.submit_directives("s", changes)
        assert state_digest(engine) == digest
        assert engine.edit("s", [Directive(0, whole - 1)]).length_after == 1
        assert engine.edit("s", [Directive(0, 1, (9,))]).length_after == 1


def test_a_span_of_nothing_replaced_by_nothing_is_an_edit_that_changes_nothing(
    tiny_folder: Folder,
) -> None:
    with make_engine(tiny_folder("v3")) as engine:
        before = own(engine)
        for mode in Mode:
            result = engine.edit("s", [Directive(7, 7, (), mode), Directive(9, 9, (), mode)])
            assert result.length_before == result.length_after
            engine.settle()
            assert own(engine) == before


def test_as_many_directives_as_are_allowed_are_carried_out(tiny_folder: Folder) -> None:
    with make_engine(tiny_folder("v3"), max_model_len=1000) as engine:
        engine.session("long").chat("the rain " * 60, PARAMS)
        assert length(engine, "long") > MAX_DIRECTIVES
        many = [Directive(at, at + 1, (9,)) for at in range(1, MAX_DIRECTIVES + 1)]
        assert len(engine.edit("long", many).receipts) == MAX_DIRECTIVES
        nothing = [Directive(3, 3)] * MAX_DIRECTIVES
        assert len(engine.edit("long", nothing).receipts) == MAX_DIRECTIVES


def test_pins_have_a_quota(tiny_folder: Folder) -> None:
    with make_engine(tiny_folder("v3"), pin_share=0.02) as engine:
        digest = state_digest(engine)
        with pytest.raises(QuotaError) as caught:
            engine.mark("s", MarkRequest("pin", Target(20, 30)))
        assert caught.value.status == 429 and state_digest(engine) == digest


# -- what is compiled -----------------------------------------------------------------------------


@pytest.fixture
def engine(tiny_folder: Folder) -> Iterator[Engine]:
    with make_engine(tiny_folder("v3")) as engine:
        yield engine


def now(engine: Engine) -> Coming:
    session = engine.sessions.get("s")
    return coming(session, engine._job(session))


def test_what_comes_of_an_idle_session_is_what_it_is(engine: Engine) -> None:
    session = engine.sessions.get("s")
    assert now(engine) == Coming(session.context, tuple(session.messages), 0, 0)


def test_a_change_is_compiled_for_the_context_that_the_edits_before_it_leave(
    engine: Engine,
) -> None:
    before = own(engine)
    engine.submit_directives("s", [Directive(3, 3, (9,) * 20)])
    engine.submit_directives("s", [Change(Target(message=2), "[gone]")])
    assert [now(engine).version, now(engine).to_come] == [2, 0]
    with pytest.raises(DirectiveError, match="0 times"):
        engine.submit_directives("s", [Change(Target(match=TOOL), "")])
    engine.submit_directives("s", [Change(Target(message=2), "[gone again]")])
    engine.submit_directives("s", [Change(Target(match="second"), "third")])
    coming_context = now(engine).context
    drain(engine)
    assert own(engine).tokens == coming_context.tokens
    info = engine.session_info("s")
    assert "[gone again]" in info.text and TOOL not in info.text and info.version == 4
    assert "third" in info.text and "second" not in info.text
    assert len(own(engine)) > len(before)


def test_a_turn_counts_what_it_may_still_generate(engine: Engine) -> None:
    told = [*HISTORY, {"role": "assistant", "content": "x"}, {"role": "user", "content": "and?"}]
    turn = engine.submit_chat(told, LONG, session_id="s")
    assert now(engine).to_come == 60
    while now(engine).to_come == 60:
        engine.step()
    assert now(engine).to_come == 59
    room = 250 - len(now(engine).context) - 59
    with pytest.raises(ContextLengthError):
        engine.submit_directives("s", [Directive(9, 9, (9,) * (room + 1))])
    edited = engine.submit_directives("s", [Directive(9, 9, (9,) * room)])
    events = drain(engine)
    assert isinstance(ending(events, edited), EditResult)
    assert isinstance(ending(events, turn), Completion)
    assert length(engine) == 250


def test_what_is_wrong_with_a_change_is_told_with_its_place(engine: Engine) -> None:
    good, wrong = Change(Target(3, 4), "a"), Change(Target(match="rainy"), "b")
    with pytest.raises(DirectiveError) as caught:
        engine.submit_directives("s", [good, Directive(8, 9), wrong])
    assert caught.value.param == "directives[2].match"


@pytest.mark.parametrize("changes", [[], (), [Directive(1, 2)] * MAX_DIRECTIVES])
def test_changes_are_listed(changes: Any) -> None:
    assert listed(changes) == tuple(changes)


def test_a_list_that_is_changed_later_is_not_changed_here(engine: Engine) -> None:
    changes = [Directive(3, 5, (9,))]
    request = engine.submit_directives("s", changes, idempotency_key="k")
    changes.append(Directive(7, 9))
    result = ending(drain(engine), request)
    assert len(result.receipts) == 1
    again = engine.submit_directives("s", [Directive(3, 5, (9,))], idempotency_key="k")
    assert ending(drain(engine), again).version == result.version
