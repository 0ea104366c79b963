"""One shard: its values, its versions, its memory of pushes, and what this server holds of it."""
