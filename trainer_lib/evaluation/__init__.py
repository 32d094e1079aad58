"""Evaluation and prediction with memory that stays flat in the number of samples. Import the submodule you need."""
