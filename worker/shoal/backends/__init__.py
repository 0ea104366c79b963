"""Process groups that carry collectives between members: a room for each transport."""
