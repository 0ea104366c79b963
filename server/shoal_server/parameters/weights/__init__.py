"""Published weights: the segments that this server holds, by whose order, and for how long."""
