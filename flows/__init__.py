"""ROOF: composition only. Which stage feeds which, and the `trainflow` command."""
