"""What tests of all folders share: a real daemon, ways to wait, and the types of the fixtures."""
