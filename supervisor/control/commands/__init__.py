"""One module for each kind of command on control.sock; see the room's docstring."""
