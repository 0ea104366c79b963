"""Progress of a member in its job: leased samples, and a clock."""
