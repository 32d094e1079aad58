"""Locks on folders of any store, as small files next to the data: the process that may write, and those that read.

`lease` admits one process at a time to a stage's folder; `claim` decides which of several writers gets a checkpoint's
folder; `removal` protects a checkpoint while it is read; `shared_parts` has many processes share the parts of one job.
`file_lock` locks open files of one machine.
"""
