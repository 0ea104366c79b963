"""Command line and git commit of this process, for the status page. Other people can read the page:
likely secrets are masked."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

from shoal_proto.health import MAX_COMMAND, RunOrigin
from shoal_proto.short_lists import sendable

GIT_WITHIN_S = 10.0
"""Limit of a command of git: a large repository on network storage may take long."""
MASK = "***"
_STAND_IN = "SHOAL.MASKED"
"""Stands for MASK until the arguments are quoted: MASK would be quoted itself."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_ENDINGS = ("token", "secret", "secrets", "password", "passwd", "passphrase", "apikey")
_SECRET_WORDS = frozenset(
    {"auth", "authorization", "bearer", "cookie", "credential", "credentials", "dsn", "pass", "pwd"}
)
_KEYS = frozenset({"key", "keys"})
_KINDS_OF_KEYS = frozenset({"access", "account", "api", "auth", "private", "secret"})
_NAMED = re.compile(
    r"""(?<![\w.-])([\w.-]+)(["']?\s*[:=]\s*)"""
    r"""("(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?|[^\s"',;&?{}\[\]]+)"""
)
"""A name and its value within an argument that is JSON, or a URL with a query."""
_HEADER = re.compile(r"""(?<![\w.-])([\w.-]+)(\s*:\s+)(?=[^\s"'])""")
"""The name of a header or of a key in YAML; its value may have blanks."""
_SECRET_VALUES = re.compile(
    # user and password of a URL, which may have @ or / themselves, and the credentials of a header
    r"(?<=://)(?:[^/\s:\"]*:[^\s\"]*|[^/\s\"]+)(?=@)|(?<=bearer )\S+|(?<=basic )\S+"
    # tokens of known services, and JSON web tokens
    r"|\b(?:hf_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[a-z]-|akia|aiza|eyj)[\w.-]{8,}"
    # random values
    r"|(?<![\w/.-])(?:[0-9a-f]{32,}|(?=[a-z]*\d)[a-z\d]{40,})(?![\w/.-])",
    re.IGNORECASE,
)


def run_origin() -> RunOrigin:
    """Return the command line and commit of this process. Runs git, each time for up to
    GIT_WITHIN_S."""
    script, *arguments = [sendable(str(each)) for each in sys.argv] or [""]
    commit, is_modified = _commit_of(script)
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    started = [script]
    if main is not None and main.name != "__main__":
        started = ["-m", main.name.removesuffix(".__main__")]
    command = command_line([*started, *arguments])
    return RunOrigin(command=command, commit=commit, is_modified=is_modified)


def command_line(arguments: Sequence[str]) -> str:
    """Return the arguments, quoted as for a shell, with likely secrets masked, up to MAX_COMMAND
    characters."""
    shown = shlex.join(_masked(arguments)).replace(_STAND_IN, MASK)
    return shown if len(shown) <= MAX_COMMAND else f"{shown[: MAX_COMMAND - 4]} ..."


def _masked(arguments: Sequence[str]) -> Iterator[str]:
    hides = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides and not argument.startswith("--"):
            yield _STAND_IN
        elif equals and _is_secret(name):
            yield f"{name}={_STAND_IN}"
        else:
            shown = _NAMED.sub(_masked_value, _SECRET_VALUES.sub(_STAND_IN, argument))
            yield _without_secret_header(shown)
        hides = argument.startswith("-") and not equals and _is_secret(name)


def _masked_value(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    return f"{name}{between}{_STAND_IN if _is_secret(name) else value}"


def _without_secret_header(argument: str) -> str:
    for found in _HEADER.finditer(argument):
        if _is_secret(found[1]):
            return argument[: found.end()] + _STAND_IN
    return argument


def _is_secret(name: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    if any(word.endswith(_SECRET_ENDINGS) or word in _SECRET_WORDS for word in words):
        return True
    if words and words[-1] in _KEYS:
        return True
    return any(word in _KEYS and kind in _KINDS_OF_KEYS for kind, word in pairwise(words))


def _commit_of(script: str) -> tuple[str, bool | None]:
    """Return the commit of the working directory (empty if there is none), and True if tracked
    files differ from it or the script is untracked (None if unknown)."""
    status = _git("status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None:
        return (_git("rev-parse", "HEAD") or "").strip(), None
    head, *rest = status.splitlines() or [""]
    commit = head.removeprefix("# branch.oid ")
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        return "", None  # a repository without a commit
    has_changes = any(not line.startswith("#") for line in rest)
    return commit, has_changes or bool(_git("ls-files", "--others", "--", script))


def _git(*arguments: str) -> str | None:
    # Take no lock on the repository, and run no program that its configuration names.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_WITHIN_S,
            env=environment,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
