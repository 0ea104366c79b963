"""A job's state machine, composed of parts with one idea each."""
