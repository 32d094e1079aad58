"""What `trainflow init` writes: a project that runs at once, offline."""
