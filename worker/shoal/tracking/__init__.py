"""What a script logs of a job, each step once, and the trackers that it goes to."""
