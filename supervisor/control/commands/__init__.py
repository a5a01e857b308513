"""One module for each kind of command on control.sock; `dispatch` knows all of them."""
