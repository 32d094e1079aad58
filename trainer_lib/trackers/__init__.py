"""Trackers, the places where metrics go: behind the protocol in `vendors`. None needs torch."""
