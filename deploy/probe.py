#!/usr/bin/env python3
"""Makes one health check, with the result as exit code: the image needs neither curl nor wget.

    shoal-probe http http://127.0.0.1:7780/readyz  the URL answers with success; https: with the
                                                   authority and certificate in folder SHOAL_TLS,
                                                   and with the token in SHOAL_TOKEN_FILE
    shoal-probe tcp 127.0.0.1:7710                 the address accepts a connection

If several URLs are given, it suffices that one answers. With --last FILE, the last answer (success,
or a status below 500) holds while there is none.

Standard library only: a check runs every few seconds during training, so it must cost little.
"""

import argparse
import os
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COORDINATOR = "coordinator.shoal"
ROLES = ("viewer", "worker", "coordinator", "operator")
ANSWER_MAX_BYTES = 4 << 20


def probe_http(options: argparse.Namespace) -> None:
    failures, is_refused = [], False
    for url in options.url.split(","):
        try:
            ask(url + options.path, options.timeout_s)
        except OSError as error:
            is_refused |= isinstance(error, urllib.error.HTTPError) and error.code < 500
            failures.append(f"{url}: {error}")
        else:
            if options.last:
                options.last.touch()
            return
    if options.last and is_refused:
        options.last.unlink(missing_ok=True)
    elif options.last and options.last.exists():
        return
    raise OSError("; ".join(failures))


def ask(url: str, timeout_s: float) -> None:
    request, context = urllib.request.Request(url), None
    if url.startswith("https:"):
        context = tls(Path(os.environ["SHOAL_TLS"]))
        # Never send the token without TLS: only a checked server may get it.
        if file := os.environ.get("SHOAL_TOKEN_FILE"):
            request.add_header("Authorization", f"Bearer {Path(file).read_text().strip()}")
    # Ignore proxies of the environment: the server is in the same cluster.
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    with direct.open(request, timeout=timeout_s) as answer:
        answer.read(ANSWER_MAX_BYTES)


class ByRole(ssl.SSLContext):
    """TLS context that accepts any coordinator: certificates name roles, not addresses."""

    def wrap_socket(self, sock: socket.socket, **options: Any) -> ssl.SSLSocket:
        return super().wrap_socket(sock, **{**options, "server_hostname": COORDINATOR})


def tls(folder: Path) -> ssl.SSLContext:
    """TLS context with the folder's authority, and its certificate if there is one."""
    context = ByRole(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(folder / "ca.crt")
    for role in ROLES:
        if (folder / f"{role}.key").exists():
            context.load_cert_chain(folder / f"{role}.crt", folder / f"{role}.key")
            break
    return context


def probe_tcp(options: argparse.Namespace) -> None:
    host, _, port = options.address.rpartition(":")
    socket.create_connection((host, int(port)), options.timeout_s).close()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal-probe", allow_abbrev=False)
    parser.add_argument("--timeout-s", type=float, default=2.0)
    kinds = parser.add_subparsers(required=True)
    http = kinds.add_parser("http", help="the URL answers with success")
    http.add_argument("url", metavar="URL[,URL...]")
    http.add_argument("--path", default="", help="appended to each URL")
    http.add_argument(
        "--last",
        type=Path,
        metavar="FILE",
        help="exists after a success; then a time without an answer is one, too",
    )
    http.set_defaults(probe=probe_http)
    tcp = kinds.add_parser("tcp", help="the address accepts a connection")
    tcp.add_argument("address", metavar="HOST:PORT")
    tcp.set_defaults(probe=probe_tcp)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        options.probe(options)
    except (OSError, ValueError, KeyError) as error:
        print(f"shoal-probe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
