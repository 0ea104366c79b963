"""HTTP clients for the coordinators' status API, without a proxy."""

import ssl
from collections.abc import Mapping

import httpx


def direct_http_client(
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> httpx.Client:
    """Client that ignores the environment (http_proxy, .netrc, SSL_CERT_FILE). Callers close it.
    `context`: TLS context for https; None: one with the system's authorities."""
    verify = True if context is None else context
    return httpx.Client(timeout=timeout_s, trust_env=False, headers=headers, verify=verify)
