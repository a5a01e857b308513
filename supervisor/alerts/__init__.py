"""The process that tells people what happens: see process.py."""
