"""Which web pages may open a WebSocket here."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit


def origin_is_allowed(origin: str, host: str, allow_origins: Sequence[str]) -> bool:
    """Whether a browser page of this origin may connect.

    CORS does not cover WebSockets: without this check, any page could use a server on the user's own machine.
    That page and server bear the same name proves nothing: whoever owns a name can point it at this machine
    (DNS rebinding). An address cannot be bent so; a server reached by name lists its origin.

    Args:
        origin: the ``Origin`` header; clients other than browsers send none and need not ask.
        host: the ``Host`` header.
    """
    if "*" in allow_origins or origin in allow_origins:
        return True
    page = _hostname(origin)
    return page is not None and (_is_loopback(page) or (page == _hostname(f"//{host}") and _is_address(page)))


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_address(hostname: str) -> bool:
    try:
        ipaddress.ip_address(hostname)
    except ValueError:
        return False
    return True


def _is_loopback(hostname: str) -> bool:
    if hostname == "localhost" or hostname.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(hostname).is_loopback
    except ValueError:
        return False
