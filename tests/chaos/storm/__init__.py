"""Shared by the chaos tests: the work that must not be lost, and everything that goes wrong."""
