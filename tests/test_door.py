from __future__ import annotations

from typing import Any

import pytest

from leyline import Directive, EngineConfig, Mode
from leyline.context import Context, salted
from leyline.directive import Source
from leyline.door import MAX_SCORES, Door, named_mode
from leyline.errors import ContextLengthError, DirectiveError, InvalidRequestError
from leyline.sampling import SamplingParams
from leyline.tokenizer import Tokenizer
from tests.tiny_models import byte_tokenizer

DOOR = Door(Tokenizer(byte_tokenizer()), 266, 50, EngineConfig(protect_first=2))


def test_a_text_becomes_ids_and_ids_stay_what_they_are() -> None:
    assert DOOR.prompt("the <|im_end|>") == [260, 223, 2]
    assert DOOR.prompt((5, 265, 0)) == [5, 265, 0]


@pytest.mark.parametrize(
    "prompt",
    [[266], [-1], [10**20], [1.0], [True], [None], ["the"], None, 5, b"the", {"a": 1}, "\ud800"],
)
def test_a_prompt_of_another_kind_or_with_strange_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError):
        DOOR.prompt(prompt)


@pytest.mark.parametrize(("length", "room"), [(1, 49), (49, 1)])
def test_room_is_what_the_window_leaves(length: int, room: int) -> None:
    assert DOOR.room(Context.of(range(length))) == room


def test_a_prompt_that_is_only_scored_may_fill_the_window() -> None:
    assert DOOR.room(Context.of(range(50)), least=0) == 0
    with pytest.raises(ContextLengthError):
        DOOR.room(Context.of(range(51)), least=0)


@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": (0, 265), "logit_bias": ((0, 1.0), (265, -1.0))},
        {"min_tokens": 5, "max_tokens": 5},
        {"min_tokens": 5},
        {"ignore_eos": True, "prompt_logprobs": 1},
    ],
)
def test_parameters_that_the_model_can_follow_are_let_in(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert DOOR.sampling(params) is params


@pytest.mark.parametrize(
    ("param", "options", "in_session"),
    [
        ("stop_token_ids", {"stop_token_ids": (5, 266)}, False),
        ("logit_bias", {"logit_bias": ((5, 1.0), (266, 0.0))}, True),
        ("min_tokens", {"min_tokens": 6, "max_tokens": 5}, False),
        ("min_tokens", {"min_tokens": 1, "max_tokens": 0, "prompt_logprobs": 0}, False),
        ("ignore_eos", {"ignore_eos": True, "constraint": object()}, False),
        ("prompt_logprobs", {"prompt_logprobs": 0}, True),
    ],
)
def test_parameters_that_it_cannot_are_refused(
    param: str, options: dict[str, Any], in_session: bool
) -> None:
    with pytest.raises(InvalidRequestError, match=param) as caught:
        DOOR.sampling(SamplingParams(**options), in_session=in_session)
    assert caught.value.param == param


@pytest.mark.parametrize("num_top", [0, 3, 20])
def test_the_scores_of_a_prompt_have_a_limit(num_top: int) -> None:
    params, most = SamplingParams(prompt_logprobs=num_top), MAX_SCORES // (num_top + 1)
    DOOR.scored(most, params)
    DOOR.scored(most + 1, SamplingParams())
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        DOOR.scored(most + 1, params)


@pytest.mark.parametrize("params", [None, {"temperature": 0}, "hot", SamplingParams])
def test_parameters_of_another_type_are_refused(params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        DOOR.sampling(params)


def test_an_empty_prompt_and_one_without_room_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        DOOR.room(Context())
    for length in (50, 51, 1000):
        with pytest.raises(ContextLengthError, match="50 tokens"):
            DOOR.room(Context.of(range(length)))


@pytest.mark.parametrize(
    "directives",
    [
        [Directive(5, 4)],
        [Directive(5, 21)],
        [Directive(-1, 4)],
        [Directive(1, 4)],  # protected
        [Directive(21, 21)],
        [Directive(10**20, 10**20)],
        [Directive(3, 6), Directive(5, 8)],
        [Directive(3, 6), Directive(4, 5)],
        [Directive(3, 6, (266,))],
        [Directive(3, 6, (-1,))],
        [Directive(3, 6, ("the",))],  # pyright: ignore
        [Directive(3, 6, "the")],  # pyright: ignore
        [Directive(3, 6, None)],  # pyright: ignore
        [Directive(3.0, 6)],  # pyright: ignore
        [Directive("3", 6)],  # pyright: ignore
        [Directive(3, None)],  # pyright: ignore
        [Directive(True, 6)],
        [Directive(3, 6, (), "burn")],  # pyright: ignore
        [Directive(3, 6, (), [])],  # pyright: ignore
        [Directive(3, 6, (7,), source="s")],  # pyright: ignore
        [Directive(3, 6, (7,), source=Source("s", 0))],  # pyright: ignore
        [Directive(3, 6, (7,), source=Source(Context.of([7]), 0.0))],  # pyright: ignore
        [Directive(3, 6, (7,), source=Source(Context.of([7]), 1))],
        [Directive(3, 6, (7,), source=Source(Context.of([8]), 0))],
        [Directive(3, 6, (7,), Mode.FORGET, Source(Context.of([7]), 0))],
        [Directive(3, 6, (7,), source=Source(Context.of([7], b"other root"), 0))],
        [Directive(i, i) for i in range(2, 20)] * 600,
        [Directive(3, 6, (), None)],  # pyright: ignore
        [(3, 6)],
        [None],
    ],
)
def test_directives_that_do_not_fit_are_refused(directives: Any) -> None:
    with pytest.raises(DirectiveError) as caught:
        DOOR.directives(directives, 20, 0)
    assert caught.value.status == 422


def test_an_edit_may_not_outgrow_the_window() -> None:
    fits = [Directive(3, 6, (7,) * 33)]
    assert DOOR.directives(fits, 20, 0) == tuple(fits)
    for length, to_come in ((20, 1), (21, 0)):
        with pytest.raises(ContextLengthError, match="50"):
            DOOR.directives(fits, length, to_come)


def test_a_set_comes_back_in_order_with_its_modes_as_modes() -> None:
    given = [
        Directive(8, 9, [7], "forget"),  # pyright: ignore
        Directive(3, 6),
    ]
    assert DOOR.directives(given, 20, 0) == (Directive(3, 6), Directive(8, 9, (7,), Mode.FORGET))
    assert all(type(directive.mode) is Mode for directive in DOOR.directives(given, 20, 0))


def test_rows_are_shared_within_one_root() -> None:
    given = [Directive(3, 6, (7,), source=Source(Context.of([7], b"root"), 0))]
    assert DOOR.directives(given, 20, 0, b"root") == tuple(given)
    for root in (b"", b"other"):
        with pytest.raises(DirectiveError, match="within one tenant"):
            DOOR.directives(given, 20, 0, root)


def test_a_mode_by_its_name() -> None:
    assert named_mode("forget") is named_mode(Mode.FORGET) is Mode.FORGET
    with pytest.raises(DirectiveError, match="amortize, forget, heal") as caught:
        named_mode("AMORTISE" * 100)
    assert len(caught.value.message) < 200


def test_a_salt_is_a_text_and_gives_a_root() -> None:
    assert DOOR.root("") == b"" and DOOR.root("a") == salted("a")
    for salt in (None, 5, b"a", ["a"], "\ud800"):
        with pytest.raises(InvalidRequestError) as caught:
            DOOR.root(salt)  # pyright: ignore
        assert caught.value.param == "cache_salt"


def test_a_name_is_a_text_of_some_length() -> None:
    assert DOOR.name("x" * 512, "session_id") == "x" * 512
    for name in ("", "x" * 513, None, 5, ["s"], {}, b"s", "\udfff"):
        with pytest.raises(InvalidRequestError) as caught:
            DOOR.name(name, "session_id")  # pyright: ignore
        assert caught.value.param == "session_id"
