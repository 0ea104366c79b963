"""Values that a script logs at each step, and the trackers that store them."""
