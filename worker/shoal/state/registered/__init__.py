"""State of the script's own: schedulers, averages, samplers; committed with the step as the model
is."""
