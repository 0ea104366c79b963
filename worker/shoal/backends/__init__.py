"""Process groups that carry collectives between members: a package for each transport."""
