"""Plans: what a run would do, take and need."""
