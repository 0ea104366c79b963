"""etcd: what the server asks of it, and where everything lies in it."""
