"""Tests of browsers in trouble: a harmful site, and a fleet seen from outside."""
