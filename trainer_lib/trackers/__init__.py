"""Trackers, the places where metrics go: one file per tracker behind the protocol in `base`. None needs torch."""
