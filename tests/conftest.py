"""What holds for all tests."""

from hypothesis import settings

# An example may take long on a busy machine, which says nothing about what is tested.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
