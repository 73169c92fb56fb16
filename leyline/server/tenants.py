"""Whose request it is: tenants and salts, and what keeps their caches apart."""

from __future__ import annotations

from fastapi import Request


def salt_of(request: Request, cache_salt: str | None) -> str:
    """The salt that the request's cache lives under: its tenant's and its own.

    Args:
        request: Whose key says which tenant it is from.
        cache_salt: The body's or query's field of that name.
    """
    return cache_salt or ""
