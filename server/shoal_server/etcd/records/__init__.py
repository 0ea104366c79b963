"""Records that several processes read, for example of servers, shards, series and snapshots."""
