"""What an answer cost, which session it belongs to, and what was done to its history.

One builder of each for all endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from leyline.events import Completion

Body = dict[str, Any]


def usage(
    completions: Iterable[Completion], *, reasoning_tokens: int = 0, num_choices: int = 1
) -> Body:
    """The usage of an answer.

    `prompt_tokens` is the length of the context; `cached_tokens` of them were not computed,
    `spliced_tokens` of those were computed in an earlier context, and `recomputed_tokens` are the
    rest. `first_difference` stands there only if the client edited its history, `degraded` only
    if a spliced part was lost and computed anew, and `state` only for a session.

    Args:
        completions: Those of the answer, in the order of its choices.
        reasoning_tokens: How many of their tokens were reasoning.
        num_choices: Choices that each prompt has; a prompt counts once, for the first of them.
    """
    completions = list(completions)
    parts = [completion.usage for completion in completions]
    firsts = parts[::num_choices]
    prompt = sum(part.prompt_tokens for part in firsts)
    completion = sum(part.completion_tokens for part in parts)
    details = {
        "cached_tokens": sum(part.cached_tokens for part in firsts),
        "spliced_tokens": sum(part.spliced_tokens for part in firsts),
        "recomputed_tokens": sum(part.recomputed_tokens for part in firsts),
    }
    body: Body = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
    if any(part.degraded for part in parts):
        body["degraded"] = True
    for one in completions:  # a session's answer is the only one of its request
        if one.usage.first_difference is not None:
            details["first_difference"] = one.usage.first_difference
        if one.session_id is not None:
            body["state"] = one.usage.state
    return body


def session_of(completions: Iterable[Completion]) -> Body:
    """The `session` entry of an answer that belongs to one; empty for any other.

    It has `receipts` if the client edited its history and rows were carried over.
    """
    for completion in completions:
        if completion.session_id is not None:
            session: Body = {"id": completion.session_id, "version": completion.version}
            if completion.receipts:
                session["receipts"] = [asdict(receipt) for receipt in completion.receipts]
            return {"session": session}
    return {}


def managed(asked: Any, edits: Sequence[Mapping[str, Any]]) -> Body:
    """The `context_management` entry of an answer: what policies did, if any had something to do.

    Args:
        asked: The request's own `context_management`.
        edits: What they report.
    """
    if asked is None and not edits:
        return {}
    return {"context_management": {"applied_edits": list(edits)}}
