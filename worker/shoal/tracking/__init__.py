"""Values that a script logs, once for each step of the job, and the trackers that store them."""
