"""What a launcher says to the coordinators for all workers of its host: heartbeats, exits."""
