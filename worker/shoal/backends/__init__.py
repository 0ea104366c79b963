"""What carries collectives between members: one module a transport, behind one small interface."""
