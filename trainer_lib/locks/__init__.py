"""Locks on folders of any store: the process that may write, and the processes that read.

`lease` admits one process at a time to a stage's folder and keeps it with a heartbeat. `claim` decides which of
several writers gets a checkpoint's folder, for the length of one save. `readers` protect a checkpoint from removal
while it is read. `shared_parts` has many processes share the parts of one job. All of these consist of small files
next to the data; none is part of what they protect. `file_lock` locks open files of
one machine.
"""
