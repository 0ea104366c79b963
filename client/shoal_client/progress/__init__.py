"""A member's progress in its job: its samples, and its clock."""
