"""Read and write text for people: durations, sizes and shares; safe terminal output.

Pure functions.

May import: nothing of ours.
Not for: log lines (log), tables (ctl).
"""
