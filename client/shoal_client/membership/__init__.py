"""A worker's membership of a job."""
