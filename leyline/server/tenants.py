"""Whose request it is: tenants and salts, and what keeps their caches apart.

With keys each tenant has a namespace of its own for cached rows and sessions alike: what one of
them does shows in nobody else's `cached_tokens`, and its sessions have names of their own. A
`cache_salt` divides a tenant's namespace further; no salt leads out of it.
"""

from __future__ import annotations

from fastapi import Request
from starlette.types import Scope

from leyline.server.keys import Keyring

_TENANT = "leyline.tenant"
_KEYRING = "leyline.keyring"


def enter(scope: Scope, keyring: Keyring, tenant: str | None) -> None:
    """Note whose request it is, where the keys were checked.

    Args:
        scope: The request's.
        keyring: The server's keys.
        tenant: Whose key it came with; None where there are no keys.
    """
    scope[_KEYRING] = keyring
    scope[_TENANT] = tenant


def salt_of(request: Request, cache_salt: str | None) -> str:
    """The salt that the request's cache lives under: its tenant's and its own.

    Without keys it is the client's salt. With keys the tenant's length stands in front of its
    name, so that no name and salt together are those of another tenant.

    Args:
        request: Whose key says which tenant it is from.
        cache_salt: The body's or query's field of that name.
    """
    tenant, salt = request.scope.get(_TENANT), cache_salt or ""
    return salt if tenant is None else f"tenant:{len(tenant)}:{tenant}:{salt}"


def is_shared(request: Request) -> bool:
    """Whether several tenants use the server, so that none may act for all."""
    keyring = request.scope.get(_KEYRING)
    return keyring is not None and keyring.num_tenants > 1
