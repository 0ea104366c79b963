"""A member of a job as a training script sees it, and the loop that keeps it training."""
