"""The MLflow run of a pipeline, notifications, the load of the machine."""
