"""`trainflow init`: a project that runs at once, offline."""
