"""Models as published: card, lineage, MLflow's flavor."""
