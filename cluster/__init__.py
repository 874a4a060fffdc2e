"""Worker groups, placement and failures, on Ray. No other package imports ray.

The modules, in the order in which to read them:

    groups of ranks       config, group, places, worker, remote (typed calls)
    calls in progress     calls, messages, failures
    the Ray cluster       connection, local_ray, hosts
    jobs on a cluster     jobs
    this machine          processes (environment, free ports, SIGTERM)
"""
