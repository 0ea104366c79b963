"""Handling of a job's effects: their order, durable writes, deadlines, silent members."""
