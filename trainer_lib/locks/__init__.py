"""Who may write and who is reading: leases, claims and readers on any store."""
