"""The Repairs service: what is wrong with a job that is quarantined, and mending it."""
