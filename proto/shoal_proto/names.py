"""Which names jobs, members and servers may have: they become keys, paths and URL segments."""

import re

MAX_NAME_LENGTH = 128
NAME_RULE = f"1 to {MAX_NAME_LENGTH} letters, digits, '.', '_' or '-', not starting with '.' or '-'"

_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH - 1}}}")


def is_name(text: str) -> bool:
    """Whether `text` may name a job, a member or a server; `NAME_RULE` says what may."""
    return _NAME.fullmatch(text) is not None
