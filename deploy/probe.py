#!/usr/bin/env python3
"""Answers one health check by its exit code, so that the image needs neither curl nor wget.

    shoal-probe http http://127.0.0.1:7780/readyz  answers with success; https: with the
                                                   certificates in the folder SHOAL_TLS
    shoal-probe tcp 127.0.0.1:7710                 accepts a connection

Standard library only: a check runs every few seconds beside the training, so it must cost little.
"""

import argparse
import os
import socket
import ssl
import sys
import urllib.request
from collections.abc import Sequence

ANSWER_MAX_BYTES = 4 << 20


def probe_http(options: argparse.Namespace) -> None:
    context = tls() if options.url.startswith("https:") else None
    with urllib.request.urlopen(options.url, timeout=options.timeout_s, context=context) as answer:
        answer.read(ANSWER_MAX_BYTES)


def tls() -> ssl.SSLContext:
    """With the viewer's certificate of the folder SHOAL_TLS."""
    folder = os.environ["SHOAL_TLS"]
    context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
    # Certificates name roles, not addresses.
    context.check_hostname = False
    context.load_cert_chain(f"{folder}/viewer.crt", f"{folder}/viewer.key")
    return context


def probe_tcp(options: argparse.Namespace) -> None:
    host, _, port = options.address.rpartition(":")
    socket.create_connection((host, int(port)), options.timeout_s).close()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal-probe", allow_abbrev=False)
    parser.add_argument("--timeout-s", type=float, default=2.0)
    kinds = parser.add_subparsers(required=True)
    http = kinds.add_parser("http", help="the URL answers with success")
    http.add_argument("url")
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
