"""What runs inside the isolation: the fork server, each job's supervisor, and the harness around untrusted code.

Standard library only, and no import of the rest of the framework: a job is a fork of these modules, so whatever they
hold in memory is what untrusted code could read.
"""
