"""Links between servers: what goes over them, and whether anybody is there."""
