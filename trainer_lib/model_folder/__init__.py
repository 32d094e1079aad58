"""A trained model with everything that it needs to predict: described in one file, and loaded from anywhere."""
