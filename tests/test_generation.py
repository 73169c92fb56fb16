"""Sampling parameters as a whole engine keeps them: the same alone, in a crowd, and interrupted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from leyline import Engine, Rendering, SamplingParams, TokenLogprob
from leyline.errors import InvalidRequestError, LeylineError
from leyline.events import Completion, Delta, EngineEvent, Failure
from leyline.sampling import Constraint
from tests.engine_state import assert_at_rest, state_digest
from tests.lockstep import tiny_engine
from tests.tiny_models import load_oracle

Folder = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
NUM_TOKENS = 266  # ids that have a text
END = 2  # <|im_end|>
# Two orders of summation in float32; log-probabilities lie between 0 and -20.
TOLERANCE = 1e-4
PROMPTS = [
    [int(token) for token in np.random.default_rng(seed).integers(3, NUM_TOKENS, 40)]
    for seed in range(4)
]
# Everything that looks at the past, and everything that is told.
RICH = SamplingParams(
    top_p=0.95,
    min_p=0.01,
    max_tokens=60,
    min_tokens=60,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias=((5, 3.0), (40, -2.0)),
    logprobs=3,
    prompt_logprobs=2,
)


@pytest.fixture(scope="module")
def shared(tiny_folder: Folder) -> Iterator[Engine]:
    """An engine whose cache is at rest between tests."""
    with tiny_engine(tiny_folder("v3"), max_model_len=200) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert_at_rest(shared)


class Script:
    """A constraint that leaves nothing but a script's next token, and at its end the stop token.

    It makes any model say anything.
    """

    def __init__(self, *tokens: int) -> None:
        self.tokens = (*tokens, END)

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        mask = np.zeros(-(-NUM_TOKENS // 32), dtype=np.uint32)
        token = self.tokens[min(len(generated), len(self.tokens) - 1)]
        mask[token // 32] = np.uint32(1) << np.uint32(token % 32)
        return mask.view(np.int32)


class Fails:
    """A constraint that cannot be followed beyond so many tokens."""

    def __init__(self, after: int, error: Exception) -> None:
        self.after, self.error = after, error

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        if len(generated) >= self.after:
            raise self.error
        return np.full(-(-NUM_TOKENS // 32), -1, dtype=np.int32)


def script(engine: Engine, text: str) -> Constraint:
    return Script(*engine.tokenizer.encode(text))


def run(engine: Engine, prompts: Sequence[list[int]], *params: SamplingParams) -> list[Completion]:
    """Answers to all of the prompts at the same time; streams have what their completions have."""
    asked = [engine.submit_prompt(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    events: dict[int, list[EngineEvent]] = {request: [] for request in asked}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    return [whole(events[request]) for request in asked]


def whole(events: Sequence[EngineEvent]) -> Completion:
    """The completion that a request's events end with, checked against its stream."""
    *deltas, completion = events
    assert isinstance(completion, Completion), completion
    pieces = [delta for delta in deltas if isinstance(delta, Delta)]
    assert len(pieces) == len(deltas)
    assert "".join(piece.text for piece in pieces) == completion.text
    assert sum((piece.token_ids for piece in pieces), ()) == completion.token_ids
    assert sum((piece.logprobs for piece in pieces), ()) == completion.logprobs
    assert completion.usage.completion_tokens == len(completion.token_ids)
    if completion.logprobs:
        assert tuple(one.token_id for one in completion.logprobs) == completion.token_ids
        assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    return completion


def seeded(params: SamplingParams, *seeds: int) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in seeds]


def numbers(told: Sequence[TokenLogprob | None]) -> list[float]:
    return [one.logprob for one in told if one is not None]


# -- alone, in a crowd, interrupted ---------------------------------------------------------------


def test_a_request_is_the_same_alone_and_in_any_batch(engine: Engine) -> None:
    params = seeded(RICH, 1, 2, 3, 4)
    params[1] = replace(params[1], constraint=script(engine, "the land"), min_tokens=0)
    params[2] = GREEDY
    alone = [run(engine, [prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    together = run(engine, PROMPTS, *params)
    backwards = run(engine, PROMPTS[::-1], *params[::-1])[::-1]
    assert [one.token_ids for one in alone] == [one.token_ids for one in together]
    assert [one.token_ids for one in alone] == [one.token_ids for one in backwards]
    assert alone[1].text == "the land"
    other = run(engine, PROMPTS[:1], replace(params[0], seed=9))
    assert other[0].token_ids != alone[0].token_ids


def test_preemption_changes_nothing(engine: Engine, tiny_folder: Folder) -> None:
    """Four long requests, and a cache that holds one and a half of them."""
    params = seeded(RICH, 1, 2, 3, 4)
    expected = run(engine, PROMPTS, *params)
    with tiny_engine(tiny_folder("v3"), kv_cache_tokens=150, max_model_len=140) as small:
        told = run(small, PROMPTS, *params)
        assert small.parts.scheduler.num_preempted > 3
        assert_at_rest(small)
    for one, other in zip(told, expected, strict=True):
        assert one.token_ids == other.token_ids and one.text == other.text
        assert one.usage == other.usage and one.usage.cached_tokens == 0
        assert len(one.logprobs) == 60 and len(one.prompt_logprobs) == 40
        for mine, theirs in (
            (one.logprobs, other.logprobs),
            (one.prompt_logprobs, other.prompt_logprobs),
        ):
            assert numbers(mine) == pytest.approx(numbers(theirs), abs=TOLERANCE)
            assert numbers(mine) != pytest.approx([1.01 * n for n in numbers(theirs)])


def random_params(random: Random) -> SamplingParams:
    """Anything that a client may ask for."""
    words = ["the", "in", "and", "er", " ", "e", "\ufffd", "<|im_start|>", "nd t"]
    most = random.randint(1, 25)
    return SamplingParams(
        temperature=random.choice([0.0, 0.3, 1.0, 2.0]),
        top_p=random.choice([1.0, 0.9, 0.5]),
        top_k=random.choice([0, 0, 1, 20]),
        min_p=random.choice([0.0, 0.0, 0.1]),
        seed=random.randrange(2**63),
        max_tokens=most,
        min_tokens=random.choice([0, 0, random.randint(0, most)]),
        stop=tuple(random.sample(words, random.choice([0, 1, 3]))),
        include_stop=random.random() < 0.3,
        stop_token_ids=tuple(random.sample(range(NUM_TOKENS), random.choice([0, 0, 30]))),
        ignore_eos=random.random() < 0.3,
        presence_penalty=random.choice([0.0, 0.0, 1.5, -1.0]),
        frequency_penalty=random.choice([0.0, 0.0, 0.7]),
        repetition_penalty=random.choice([1.0, 1.0, 1.3, 0.8]),
        logit_bias=tuple((random.randrange(NUM_TOKENS), random.uniform(-9, 9)) for _ in range(3)),
        logprobs=random.choice([None, 0, 2]),
        prompt_logprobs=random.choice([None, None, 0, 2]),
        skip_special_tokens=random.random() < 0.7,
        shown=tuple(random.sample(["<|im_start|>", "<|endoftext|>"], random.choice([0, 1]))),
    )


def test_whatever_is_asked_for_is_told_alike_in_a_stream_alone_and_under_pressure(
    engine: Engine, tiny_folder: Folder
) -> None:
    random = Random(1)
    params = [random_params(random) for _ in range(60)]
    prompts = [PROMPTS[n % 4][: random.randint(1, 40)] for n in range(60)]
    alone = [run(engine, [ids], one)[0] for ids, one in zip(prompts, params, strict=True)]
    with tiny_engine(tiny_folder("v3"), kv_cache_tokens=90, max_model_len=80) as small:
        told = run(small, prompts, *params)
        assert small.parts.scheduler.num_preempted > 10
        assert_at_rest(small)
    for one, other, asked in zip(told, alone, params, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert (one.finish_reason, one.stopped_by) == (other.finish_reason, other.stopped_by)
        assert len(one.logprobs) == (0 if asked.logprobs is None else len(one.token_ids))
        scored = asked.prompt_logprobs is not None
        assert len(one.prompt_logprobs) == (len(one.prompt_token_ids) if scored else 0)
        assert isinstance(one.stopped_by, str) or len(one.token_ids) >= asked.min_tokens
    reasons = Counter(type(one.stopped_by) for one in told)
    assert min(reasons[str], reasons[int], reasons[type(None)]) > 3, reasons


# -- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_all_log_probabilities_are_those_of_transformers(tiny_folder: Folder, budget: int) -> None:
    folder = tiny_folder("v3")
    with tiny_engine(folder, max_num_batched_tokens=budget) as engine:
        engine.generate(PROMPTS[0], GREEDY)  # the cache has all of it
        (reply,) = run(engine, PROMPTS[:1], replace(RICH, max_tokens=12, min_tokens=12, seed=1))
    assert reply.prompt_token_ids == tuple(PROMPTS[0]) and reply.usage.cached_tokens == 0
    tokens = [*PROMPTS[0], *reply.token_ids]
    logits = load_oracle(folder)(torch.tensor([tokens])).logits[0, :-1, :NUM_TOKENS]
    table = logits.double().log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(table, tokens[1:], strict=True)]
    first, *told = (*reply.prompt_logprobs, *reply.logprobs)
    assert first is None and len(told) == len(expected)
    assert numbers(told) == pytest.approx(expected, abs=TOLERANCE)
    assert numbers(told) != pytest.approx([1.01 * value for value in expected])
    for one, row in zip(told, table, strict=True):
        assert one is not None and len(one.top) in (2, 3)
        values, ids = row.topk(len(one.top))
        assert [token for token, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_log_probabilities_are_finite_whatever_is_ruled_out(engine: Engine) -> None:
    cold = replace(RICH, temperature=1e-3, top_k=1, logprobs=20, prompt_logprobs=20)
    cold = replace(cold, constraint=script(engine, "in the"), min_tokens=0, max_tokens=9)
    (reply,) = run(engine, PROMPTS[:1], cold)
    assert reply.text == "in the"
    for one in (*reply.logprobs, *reply.prompt_logprobs[1:]):
        assert one is not None and len(one.top) == 20
        assert all(math.isfinite(value) for value in (one.logprob, *dict(one.top).values()))


def test_nothing_is_told_that_was_not_asked_for(engine: Engine) -> None:
    (reply,) = run(engine, PROMPTS[:1], GREEDY)
    assert (reply.logprobs, reply.prompt_logprobs) == ((), ())
    (reply,) = run(engine, PROMPTS[:1], replace(GREEDY, logprobs=0, prompt_logprobs=0))
    assert len(reply.logprobs) == 8 and len(reply.prompt_logprobs) == 40
    assert not any(one.top for one in (*reply.logprobs, *reply.prompt_logprobs[1:]) if one)


@pytest.mark.parametrize("length", [1, 40, 200])
def test_a_prompt_that_is_only_scored_gets_no_token(engine: Engine, length: int) -> None:
    prompt = [5 + n % 200 for n in range(length)]
    (reply,) = run(engine, [prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("", (), "length")
    assert len(reply.prompt_logprobs) == length and reply.prompt_logprobs[0] is None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (length, 0)


def test_scores_of_a_prompt_are_those_of_its_continuation(engine: Engine) -> None:
    """What was sampled, told as a part of a prompt: as evaluations score their answers."""
    (reply,) = run(engine, PROMPTS[:1], replace(GREEDY, logprobs=1))
    (again,) = run(
        engine,
        [[*PROMPTS[0], *reply.token_ids]],
        SamplingParams(max_tokens=0, prompt_logprobs=1),
    )
    scores = again.prompt_logprobs[40:]
    assert numbers(scores) == pytest.approx(numbers(reply.logprobs), abs=TOLERANCE)


# -- how a reply ends -----------------------------------------------------------------------------


def reply_to(engine: Engine, text: str, **options: Any) -> Completion:
    """The reply of a model that says this text and ends."""
    params = SamplingParams(temperature=0.0, constraint=script(engine, text), **options)
    return run(engine, PROMPTS[:1], params)[0]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_and_what_is_told_of_it(
    engine: Engine, include: bool, logprobs: int | None
) -> None:
    text = "in the land"
    reply = reply_to(engine, text, stop=("d", "an"), include_stop=include, logprobs=logprobs)
    assert (reply.text, reply.finish_reason) == ("in the lan" if include else "in the l", "stop")
    assert reply.stopped_by == "an"
    # "and" is one token: neither with its "an" nor without is it a part of the reply.
    assert reply.token_ids == tuple(engine.tokenizer.encode(text)[:-1])
    assert len(reply.logprobs) == (len(reply.token_ids) if logprobs else 0)


@pytest.mark.parametrize("include", [False, True])
def test_a_clients_own_stop_token(engine: Engine, include: bool) -> None:
    ids = engine.tokenizer.encode("in the er land")
    er = engine.tokenizer.encode("er")[0]
    stop = {"stop_token_ids": (er,), "include_stop": include, "logprobs": 0}
    reply = reply_to(engine, "in the er land", **stop)
    assert reply.text == ("in the er" if include else "in the ")
    assert (reply.finish_reason, reply.stopped_by) == ("stop", er)
    assert reply.token_ids == tuple(ids[: ids.index(er) + 1])


def test_the_models_own_end_is_nobodys_stop(engine: Engine) -> None:
    reply = reply_to(engine, "in the", include_stop=True, skip_special_tokens=False)
    assert (reply.text, reply.stopped_by) == ("in the<|im_end|>", None)
    reply = reply_to(engine, "in the", stop_token_ids=(END,))
    assert (reply.text, reply.stopped_by, reply.token_ids[-1]) == ("in the", END, END)


def test_a_reply_is_not_too_short(engine: Engine) -> None:
    likes = SamplingParams(temperature=0.0, logit_bias=((END, 100.0),), max_tokens=20)
    assert run(engine, PROMPTS[:1], likes)[0].token_ids == (END,)
    longer = run(engine, PROMPTS[:1], replace(likes, min_tokens=5))[0]
    assert len(longer.token_ids) == 6 and longer.token_ids.index(END) == 5
    other = replace(likes, min_tokens=5, logit_bias=((70, 100.0),), stop_token_ids=(70,))
    assert run(engine, PROMPTS[:1], other)[0].token_ids.index(70) == 5


def test_a_stop_string_in_a_reply_that_is_too_short_is_text(engine: Engine) -> None:
    tokens = len(engine.tokenizer.encode("in the"))
    reply = reply_to(engine, "in the the land", stop=("the",), min_tokens=tokens)
    assert (reply.text, reply.stopped_by) == ("in the ", "the")
    assert reply_to(engine, "in the the", stop=("the",)).text == "in "


# -- special tokens -------------------------------------------------------------------------------


def test_special_tokens_are_left_out_or_shown(engine: Engine) -> None:
    said = "in<|im_start|>the<|endoftext|>"
    assert reply_to(engine, said).text == "inthe"
    assert reply_to(engine, said, shown=("<|im_start|>", "no token")).text == "in<|im_start|>the"
    assert reply_to(engine, said, skip_special_tokens=False).text == said


@pytest.mark.parametrize("shown", [(), ("<|endoftext|>",)])
def test_a_shown_marker_that_the_template_writes_again_is_no_edit(
    engine: Engine, shown: tuple[str, ...]
) -> None:
    """A parser makes a call of what stands between markers, and the template markers of a call.

    The context was edited, so that only what the client was told says that it goes on.
    """
    said = "<|endoftext|>the call<|endoftext|>"
    params = SamplingParams(temperature=0.0, constraint=script(engine, said), shown=shown)
    history = [{"role": "user", "content": "hello"}]
    list(engine.turn(history, params, {}, "tools"))
    engine.session("tools").replace("hello", "the")
    history.append({"role": "assistant", "content": said})
    history.append({"role": "user", "content": "and?"})
    *_, reply = engine.turn(history, GREEDY, {}, "tools")
    engine.delete_session("tools")
    assert isinstance(reply, Completion)
    continued = reply.usage.first_difference is None
    assert continued is bool(shown)


@pytest.mark.parametrize("scratched", [False, True])
@pytest.mark.parametrize("sent_back", ["the land", "<think>hm</think>the land", "the sea"])
def test_an_edit_stays_whatever_becomes_of_the_reasoning_behind_it(
    engine: Engine, scratched: bool, sent_back: str
) -> None:
    """The session forgets its reasoning, or the client, or both, or neither."""
    said = "<think>hm</think>the land"
    params = SamplingParams(temperature=0.0, constraint=script(engine, said))
    history = [{"role": "user", "content": "0123456789 hello 0123456789"}]
    chat = engine.session("thinker")
    if scratched:
        chat.chat("mark me", GREEDY)
        chat.scratch(of="reasoning")
        history = [*chat.messages, *history]
    list(engine.turn(history, params, {}, "thinker"))
    engine.settle()
    assert ("hm" not in chat.text) is scratched
    chat.replace("hello", "the")
    history.append({"role": "assistant", "content": sent_back})
    history.append({"role": "user", "content": "and?"})
    list(engine.turn(history, GREEDY, {}, "thinker"))
    text = chat.text
    chat.delete()
    assert "0123456789 the 0123456789" in text and sent_back.rpartition(">")[2] in text
    assert text.count("and?") == 1 and ("hm" in text) is (not scratched and "hm" in sent_back)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [(), (70,), (END,)])
def test_a_client_that_sends_back_what_it_got_goes_on(
    engine: Engine, include: bool, stop: tuple[int, ...]
) -> None:
    said = engine.tokenizer.decode([*engine.tokenizer.encode("in the"), 70])
    params = SamplingParams(
        temperature=0.0,
        constraint=script(engine, said),
        stop_token_ids=stop,
        include_stop=include,
    )
    chat = engine.session("echo")
    first = chat.chat("hello", params)
    assert first.finish_reason == "stop" and first.text.startswith("in the")
    second = chat.chat("and?", GREEDY)
    assert second.usage.first_difference is None
    length = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.cached_tokens >= length - 1
    chat.delete()


# -- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("error", [LeylineError("It ends here."), ZeroDivisionError("a bug")])
def test_a_form_that_cannot_be_followed_ends_its_own_request(
    engine: Engine, after: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(engine, PROMPTS[:2], *seeded(RICH, 1, 2))
    others = [engine.submit_prompt(PROMPTS[n], seeded(RICH, 1, 2)[n]) for n in (0, 1)]
    failing = engine.submit_prompt(PROMPTS[2], SamplingParams(constraint=Fails(after, error)))
    events: dict[int, list[EngineEvent]] = {request: [] for request in (*others, failing)}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    last = events[failing][-1]
    assert isinstance(last, Failure) and isinstance(last.error, LeylineError)
    assert last.error is error or "ZeroDivisionError" in last.error.message
    told = [
        token for event in events[failing] if isinstance(event, Delta) for token in event.token_ids
    ]
    assert len(told) <= after
    got = [whole(events[request]) for request in others]
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert "It ends here." not in caplog.text


def test_a_form_is_kept_through_preemption(tiny_folder: Folder) -> None:
    text = "the land in the end and then the end"
    with tiny_engine(tiny_folder("v3"), kv_cache_tokens=90, max_model_len=80) as small:
        params = [SamplingParams(constraint=script(small, text), seed=seed) for seed in range(4)]
        told = run(small, PROMPTS, *params)
        assert small.parts.scheduler.num_preempted
    assert [one.text for one in told] == [text] * 4


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("stop_token_ids", {"stop_token_ids": (NUM_TOKENS,)}),
        ("logit_bias", {"logit_bias": ((NUM_TOKENS, 1.0),)}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("ignore_eos", {"constraint": Script(5), "ignore_eos": True}),
        ("prompt_logprobs", {"prompt_logprobs": 0}),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_has_changed(
    engine: Engine, param: str, options: dict[str, Any]
) -> None:
    before = state_digest(engine)
    with pytest.raises(InvalidRequestError, match=param) as caught:
        engine.submit_chat(
            [{"role": "user", "content": "hello"}], SamplingParams(**options), session_id="s"
        )
    assert caught.value.param == param and state_digest(engine) == before


# -- in a notebook --------------------------------------------------------------------------------


def test_options_may_be_given_as_people_write_them(engine: Engine) -> None:
    plain = engine.generate(PROMPTS[0], GREEDY, logit_bias={70: 100.0}, stop_token_ids=[70])
    assert plain.token_ids == (70,) and plain.stopped_by == 70
    text = engine.tokenizer.decode([70])
    assert engine.generate(PROMPTS[0], GREEDY, logit_bias={70: 100.0}, stop=[text]).text == ""
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        engine.generate(PROMPTS[0], GREEDY, logit_bias={"70": 100.0})


def test_a_stream_holds_no_empty_pieces(engine: Engine) -> None:
    options: dict[str, Any] = {"constraint": script(engine, "in the land"), "logprobs": 1}
    assert "" not in list(engine.stream("hello", GREEDY, **options))


def test_a_rendering_goes_all_the_way(engine: Engine) -> None:
    bare = Rendering(opens_reply=False)
    history = [{"role": "user", "content": "hello"}]
    assert engine.chat("hello", GREEDY).prompt_token_ids[:3] == tuple(
        engine.tokenizer.encode("<|im_start|>user\nhello")[:3]
    )
    told = engine.chat("hello", GREEDY, rendering=bare).prompt_token_ids
    expected = engine.tokenizer.render(history, add_generation_prompt=False)
    assert told == tuple(engine.tokenizer.encode(expected))
    list(engine.stream("hello", GREEDY, rendering=bare))
    chat = engine.session("bare")
    chat.chat("hello", GREEDY, rendering=bare)
    assert chat.text.startswith(expected)
    list(chat.stream("hello", GREEDY, rendering=bare))
    chat.delete()
