"""What crosses process borders. Imports nothing of the supervisor or the workers."""
