"""Membership: members, events and notices, phases, pauses, setbacks, refusals."""
