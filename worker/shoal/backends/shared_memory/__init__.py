"""Memory that the ranks of one machine share, and how they meet there and miss each other."""
