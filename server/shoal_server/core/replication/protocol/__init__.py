"""Events and effects of a server's core, and messages between servers."""
