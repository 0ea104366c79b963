"""The point at which a coordinator includes more than the membership of jobs."""
