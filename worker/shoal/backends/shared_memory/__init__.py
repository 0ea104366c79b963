"""Memory that the ranks of one machine share."""
