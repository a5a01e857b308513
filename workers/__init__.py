"""Code that runs inside worker processes, and the tools people build workers with."""
