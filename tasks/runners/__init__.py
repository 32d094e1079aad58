"""A stage's workers as mapped tasks of Prefect, which run on the machines of a cluster. One kind of cluster, one file.

::

    stage task ── map ──▶ worker's task ── launch ──▶ guard ──▶ worker      on whichever machine has room
              ◀────────── the job's folder ───────────                      reports, and the owner's sign of life
"""
