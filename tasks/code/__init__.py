"""The part of a recipe's code that a stage depends on."""
