"""What every stage shares: its key, its manifest, how it runs, retries and reports."""
