"""What a server is told, what it wants done, and what servers tell each other."""
