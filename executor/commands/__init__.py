"""The commands of `harmony-executor`, one a file, and how they print."""
