"""A job, from its file to a finished run: checks, stages in order, recovery, lineage, plans.

The modules, in the order in which to read them:

    the job               job_file, foreign_keys, job, registry (its stages), models
    the run               pipeline, run, recovery
    its report            report, watch
    its plan              plan, memory, times, waiting
    other commands        starter, starter_sections (`heed init`), loop, replay
    on a cluster          submission, launchers/
"""
