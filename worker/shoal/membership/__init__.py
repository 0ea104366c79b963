"""Membership of a member in its job: join configuration, generation, validators, drain, health."""
