"""Replay schedules on the devices of one server, and measure: profiles, hardware, iterations."""
