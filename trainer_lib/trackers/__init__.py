"""Where metrics go: one file per tracker behind one protocol (`base`). Importing it imports no torch and no vendor."""
