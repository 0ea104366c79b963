"""What became of a job over its life: changes of generations with cause and pause, and charts."""
