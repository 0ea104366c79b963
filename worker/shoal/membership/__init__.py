"""A member's membership in its job: join configuration, generation, validators, drain, health."""
