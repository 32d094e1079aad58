"""MLflow: the tracker, the delivery of what the spool keeps, and the registry of models."""
