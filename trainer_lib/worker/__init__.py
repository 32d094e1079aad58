"""The process that does the heavy work: ``python -m trainer_lib.worker <verb> <run dir>``."""
