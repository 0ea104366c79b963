"""Connections to the coordinators, and to other members: whom to ask, and for how long."""
