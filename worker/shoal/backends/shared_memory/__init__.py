"""Memory that the ranks of one machine share: its set-up, barriers in it, and loss of a rank."""
