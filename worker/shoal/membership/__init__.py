"""A member's place in its job: what it joins with, its generation, validators, leaving."""
