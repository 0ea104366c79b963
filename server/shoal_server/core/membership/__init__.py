"""What membership is made of: members, events and notices, phases, pauses, setbacks, refusals."""
