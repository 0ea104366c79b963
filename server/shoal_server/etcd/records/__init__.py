"""Records that several processes read. Reads and writes raise what their store raises."""
