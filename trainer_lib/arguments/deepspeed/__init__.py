"""DeepSpeed's own configuration: reading it, checking it, and combining it with the arguments."""
