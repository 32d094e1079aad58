"""Building blocks of the settings."""
