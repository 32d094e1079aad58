"""Engines: what places machines of a cluster, starts the work there, watches it and ends it. One engine, one file.

::

    launch -> guard -> driver == Engine ==> member 0: launch (leads)     on machines of the cluster
    (this machine)                          member 1: follow ...

The driver is a process of its own, so what orchestrates imports nothing of an engine. On each machine a *member* runs:
the first leads as any leading machine does, and the others follow it, so what holds for several machines holds here.
"""
