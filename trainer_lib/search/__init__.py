"""Hyperparameter search: many trainings of one Trainer. Import the submodule you need; `optuna` needs the extra."""
