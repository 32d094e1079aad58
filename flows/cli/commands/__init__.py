"""Commands, by subject: the functions that `trainflow.flows.cli.main` lists by name."""
