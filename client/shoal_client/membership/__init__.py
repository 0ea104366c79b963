"""A worker's membership of a job: its state, its decisions, and the code that carries them out."""
