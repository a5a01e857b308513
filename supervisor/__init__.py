"""The daemon: a pure core that decides and a shell that acts."""
