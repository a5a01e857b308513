"""Code for both sides of a process border. Imports nothing of the supervisor or the workers when it
runs."""
