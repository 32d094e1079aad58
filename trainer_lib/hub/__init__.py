"""Publishes model, card and metrics to a folder on any store or to the Hugging Face Hub."""
