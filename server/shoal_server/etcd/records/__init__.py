"""Records that several processes read: servers, shard assignments, shard maps, snapshot roots."""
