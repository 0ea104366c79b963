"""Optional traces of calls through all processes that take part in them, and bounds of logs."""
