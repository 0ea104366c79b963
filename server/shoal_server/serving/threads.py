"""Blocking work in a thread that is waited for even if its caller is cancelled once."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_thread_uncancelled(work: Callable[[], T]) -> T:
    """Run `work` in a thread. If cancelled, raise CancelledError only when the work ends: the
    thread may still change what the caller would undo. A second cancellation is raised at once."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
