"""Keras 3 models on torch under the Trainer's loop: `TFTrainer`."""
