"""A member's progress in its job: its leased samples, and its clock."""
