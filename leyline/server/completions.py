"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from leyline.events import Completion
from leyline.sampling import SamplingParams
from leyline.server.answer import Answer, constrained, seeded
from leyline.server.ask import Over, Reply, Said
from leyline.server.bodies import StrictRoute
from leyline.server.chat import stop_reason
from leyline.server.lengths import check_fits, strings_in
from leyline.server.logprobs import LegacyLogprobs, joined, prompt_logprobs
from leyline.server.parsers.pieces import Content
from leyline.server.reading import plain
from leyline.server.reply import Manner, respond
from leyline.server.schema import CompletionRequest
from leyline.server.serving import Serving
from leyline.server.tenants import salt_of
from leyline.server.usage import Body
from leyline.server.wire import while_connected
from leyline.server.worker import Submit
from leyline.tokenizer import Tokenizer


class CompletionForm:
    """How a completion is spelt: the same choice in every chunk, with text in it.

    The log-probabilities of an echoed prompt are known when its answer is, so a stream that wants
    them begins then.

    Args:
        tokenizer: Knows the tokens' texts.
        body: What was asked for.
    """

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, body: CompletionRequest) -> None:
        self._tokenizer = tokenizer
        self._prompts = body.prompt
        self._num_choices = body.num_choices
        self._echoes = bool(body.echo)
        self._tells_logprobs = body.logprobs is not None
        self._tells_ids = bool(body.return_token_ids)
        self._tells_prompt = body.prompt_logprobs is not None
        shown = body.skip_special_tokens is False
        self._logprobs = [
            LegacyLogprobs(tokenizer, skip_special=not shown)
            for _ in range(len(body.prompt) * body.num_choices)
        ]
        self._kept: dict[int, list[Said]] = {}

    def whole(self, reply: Reply) -> Body:
        """A complete text."""
        over = reply.over
        choice = self._choice(over.index, self._echo(over.index) + reply.content, over.reason)
        if self._tells_logprobs:
            parts = [] if not self._echoes else [self._prompts_logprobs(over)]
            parts.append(self._logprobs[over.index].said(reply.logprobs))
            choice["logprobs"] = joined(*parts) if len(parts) > 1 else parts[0]
        if self._tells_ids:
            choice["token_ids"] = list(over.completion.token_ids)
        return choice | self._ended(over.completion)

    def opening(self, index: int) -> Body | None:
        """The prompt, if it is to be repeated and nothing is told about its tokens."""
        if not self._echoes or self._tells_logprobs:
            return None
        return self._choice(index, self._echo(index))

    def said(self, said: Said) -> Iterable[Body]:
        """A piece of the text."""
        if self._echoes and self._tells_logprobs:
            self._kept.setdefault(said.index, []).append(said)
        else:
            yield from self._spelt(said)

    def closing(self, over: Over) -> Iterable[Body]:
        """Why it ended, behind what was kept until now."""
        if self._echoes and self._tells_logprobs:
            echo = self._choice(over.index, self._echo(over.index))
            yield echo | {"logprobs": self._prompts_logprobs(over)}
            for said in self._kept.pop(over.index, ()):
                yield from self._spelt(said)
        yield self._choice(over.index, "", over.reason) | self._ended(over.completion)

    def beside(self, completion: Completion) -> Body:
        """Nothing: what is told of a prompt stands in its choices."""
        return {}

    def _spelt(self, said: Said) -> Iterable[Body]:
        text = "".join(piece.text for piece in said.pieces if isinstance(piece, Content))
        choice = self._choice(said.index, text)
        if self._tells_logprobs and said.logprobs:
            choice["logprobs"] = self._logprobs[said.index].said(said.logprobs)
        if self._tells_ids and said.token_ids:
            choice["token_ids"] = list(said.token_ids)
        if text or choice["logprobs"] or "token_ids" in choice:
            yield choice

    def _choice(self, index: int, text: str, finish_reason: str | None = None) -> Body:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _echo(self, index: int) -> str:
        """The prompt in front of the answer: as it was sent, or what its ids say."""
        if not self._echoes:
            return ""
        prompt = self._prompts[index // self._num_choices]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special=False)

    def _prompts_logprobs(self, over: Over) -> Body:
        done = over.completion
        return self._logprobs[over.index].echoed(
            self._echo(over.index), done.prompt_token_ids, done.prompt_logprobs
        )

    def _ended(self, completion: Completion) -> Body:
        told = stop_reason(completion)
        if self._tells_ids:
            told["prompt_token_ids"] = list(completion.prompt_token_ids)
        if self._tells_prompt:
            told["prompt_logprobs"] = prompt_logprobs(self._tokenizer, completion.prompt_logprobs)
        return told


def routes(serving: Serving) -> APIRouter:
    """The completions route."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several, whole or as a stream."""
        serving.check_model(body.model)
        body.check()
        form = CompletionForm(serving.worker.engine.tokenizer, body)
        running = None
        if body.wants_running_usage:
            running = await while_connected(request.receive, _count(serving, body))
        answer = await _submitted(serving, request, body)
        manner = Manner(
            stream=bool(body.stream),
            include_usage=body.wants_usage or serving.config.force_usage,
            running_from=running,
            num_choices=body.num_choices,
            request_id=body.request_id,
        )
        return await respond(serving, request, answer, form, manner)

    return router


async def _submitted(serving: Serving, request: Request, body: CompletionRequest) -> Answer:
    """Submit a request a choice, all of them or none."""
    salt, params = salt_of(request, body.cache_salt), body.sampling()
    compiling = serving.constraints.of_text(body.form())
    start = await while_connected(request.receive, compiling)
    fitting = check_fits(serving, strings_in(body.prompt), "prompt")
    await while_connected(request.receive, fitting)
    submits = [
        _submit(serving, prompt, constrained(seeded(params, index), start), salt)
        for prompt in body.prompt
        for index in range(body.num_choices)
    ]
    subscription = await serving.worker.submit(submits)
    return Answer(subscription, [plain(index) for index in range(len(submits))])


def _submit(
    serving: Serving, prompt: str | Sequence[int], params: SamplingParams, salt: str
) -> Submit:
    return partial(serving.worker.engine.submit_prompt, prompt, params, salt=salt)


async def _count(serving: Serving, body: CompletionRequest) -> int:
    """Tokens of all prompts."""
    encode = serving.worker.engine.tokenizer.encode
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    counts = [len(await serving.beside(encode, text, bos=True)) for text in texts]
    return sum(counts) + sum(len(prompt) for prompt in body.prompt if not isinstance(prompt, str))
