"""Where the bytes of a job lie in its shards, and what a call carries of them."""
