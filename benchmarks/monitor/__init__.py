"""Alarms of the monitor."""
