"""Launchers: how worker processes are started and ended, on this machine and on several. Imports no torch."""
