"""The Prefect API that a flow needs: an embedded server, schedules and deployments."""
