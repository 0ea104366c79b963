"""Published weights: the segments that this server holds, serves and frees."""
