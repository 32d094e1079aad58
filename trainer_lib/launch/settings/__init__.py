"""The settings of a launch: their checks, additions of schedulers and engines, and the variables of workers."""
