"""Records that several processes read, such as those of servers, shards, series and snapshots."""
