"""A member's progress in its job: the samples it has leased, and its clock."""
