"""Two programs of two jobs that use each other's objects: the tests of a test file, which are trusted, and the
solution, which is not. Data crosses by value, everything else as a handle; each side calls only what it was given.
"""
