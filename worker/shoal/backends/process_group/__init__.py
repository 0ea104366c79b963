"""What all process groups share: the interface, torch's collectives brought down to a few."""
