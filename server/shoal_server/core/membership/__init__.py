"""One job's membership: who is there, who goes, and how each generation is agreed on."""
