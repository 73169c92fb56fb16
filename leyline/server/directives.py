"""`POST /v1/directives`: edit a session's context, or see what an edit would do."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from functools import partial

from fastapi import APIRouter, Request, Response

from leyline.errors import InvalidRequestError, LeylineError
from leyline.events import EditPlan, EditResult, Failure
from leyline.server.bodies import StrictRoute
from leyline.server.fields import MAX_NAME_CHARS
from leyline.server.lengths import check_fits, strings_in
from leyline.server.pointed import changes_of
from leyline.server.schema_edits import DirectivesRequest
from leyline.server.serving import Serving
from leyline.server.tenants import salt_of
from leyline.server.usage import Body
from leyline.server.wire import Json, while_connected
from leyline.server.worker import Submit, Worker

IDEMPOTENCY_HEADER = "idempotency-key"


def result_body(result: EditResult) -> Body:
    """What became of a set of directives."""
    body = _counted("directive.result", result) | {
        "state": result.state,
        "elapsed_ms": round(result.elapsed_ms, 3),
    }
    if result.purged is not None:
        body["purged"] = asdict(result.purged)
    return body


def plan_body(plan: EditPlan) -> Body:
    """What a set of directives would do; times are null before anything was measured."""
    return _counted("directive.plan", plan) | {
        "estimated_ms": {"amortize": _ms(plan.amortize_ms), "forget": _ms(plan.forget_ms)},
        "cheaper": plan.cheaper,
    }


def idempotency_key(body: DirectivesRequest, headers: Sequence[str]) -> str | None:
    """The key that a request was sent with, in its body or in its header.

    Raises:
        InvalidRequestError: if it has several that differ, or one that is empty or too long.
    """
    keys = {*headers, *([] if body.idempotency_key is None else [body.idempotency_key])}
    if len(keys) > 1:
        raise InvalidRequestError(
            "The request has two idempotency keys that differ; send one, in the body or in the "
            "header Idempotency-Key.",
            param="idempotency_key",
        )
    key = next(iter(keys), None)
    if key is not None and not 1 <= len(key) <= MAX_NAME_CHARS:
        raise InvalidRequestError(
            f"An idempotency key has 1 to {MAX_NAME_CHARS} characters; this one has {len(key)}.",
            param="idempotency_key",
        )
    return key


def routes(serving: Serving) -> APIRouter:
    """The route that edits."""
    router = APIRouter(route_class=StrictRoute)
    worker, engine = serving.worker, serving.worker.engine

    @router.post("/v1/directives")
    async def apply_directives(body: DirectivesRequest, request: Request) -> Response:
        """Edit a session's context: all of the directives, or none of them."""
        with _counted_if_refused(worker, body):
            return await carried_out(body, request)

    async def carried_out(body: DirectivesRequest, request: Request) -> Response:
        key = idempotency_key(body, request.headers.getlist(IDEMPOTENCY_HEADER))
        asked = {
            "session_id": body.session_id,
            "changes": changes_of(body.directives),
            "salt": salt_of(request, body.cache_salt),
            "expected_version": body.expected_version,
        }
        replacements = strings_in([directive.replacement for directive in body.directives])
        await while_connected(request.receive, check_fits(serving, replacements, "directives"))
        if body.dry_run:
            planning = worker.call(partial(engine.plan_directives, **asked))
            return Json(plan_body(await while_connected(request.receive, planning)))
        submit = partial(engine.submit_directives, **asked, idempotency_key=key)
        return Json(result_body(await while_connected(request.receive, _result(worker, submit))))

    return router


@contextmanager
def _counted_if_refused(worker: Worker, body: DirectivesRequest) -> Generator[None, None, None]:
    """Tell the observer of edits that do not come about; a plan was never to."""
    try:
        yield
    except LeylineError:
        if not body.dry_run:
            worker.observer.refused(directive.mode for directive in body.directives)
        raise


def _counted(kind: str, edit: EditResult | EditPlan) -> Body:
    return {
        "object": kind,
        "session_id": edit.session_id,
        "version": edit.version,
        "context_length": {"before": edit.length_before, "after": edit.length_after},
        "receipts": [asdict(receipt) for receipt in edit.receipts],
    }


def _ms(estimate: float | None) -> float | None:
    return None if estimate is None else round(estimate, 3)


async def _result(worker: Worker, submit: Submit) -> EditResult:
    """Submit a set of directives and wait for what becomes of it."""
    async with aclosing(worker.run(submit)) as events:
        async for happened in events:
            if isinstance(happened, Failure):
                raise happened.error
            if isinstance(happened, EditResult):
                return happened
    raise AssertionError("a request ended without a terminal event")
