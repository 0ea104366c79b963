"""Values that a script logs of a job, each step once, and the trackers that store them."""
