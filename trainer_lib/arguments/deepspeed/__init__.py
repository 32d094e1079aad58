"""DeepSpeed's own configuration: read, checked, and brought together with the arguments."""
