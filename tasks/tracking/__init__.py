"""The MLflow run of a pipeline, and the load of the machine."""
