"""The record of a run: report, charts, MLflow, Prefect's page."""
