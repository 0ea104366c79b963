"""History of a job: changes of generations with cause and pause, and charts."""
