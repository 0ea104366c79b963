"""The Repairs service: shows what is wrong with a quarantined job, and repairs it."""
