"""What holds for all tests."""

from hypothesis import settings

# How long an example takes is the machine's affair: beside other tests, any may take long.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")
