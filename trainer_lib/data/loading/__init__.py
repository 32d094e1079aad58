"""Order, loading and collation of samples for training and evaluation."""
