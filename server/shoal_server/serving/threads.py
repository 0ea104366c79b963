"""Blocking work that is not left alone when whoever waits for it is cancelled."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_thread_uncancelled(work: Callable[[], T]) -> T:
    """Run it in a thread. Cancelled meanwhile, this ends when the work does: a thread cannot be
    stopped, and nobody should undo or look at what it is still doing."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
