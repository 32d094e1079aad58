"""The ground: texts, records, secrets, durations. No torch."""
