"""Who may do what over HTTP: tokens with roles, sessions of the page, and a log of who did it."""
