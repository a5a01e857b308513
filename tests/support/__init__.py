"""Code that tests of all folders share: a real daemon, ways to wait, types of fixtures."""
