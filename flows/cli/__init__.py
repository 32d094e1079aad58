"""The `trainflow` command: one file per group of commands, and what they share."""
