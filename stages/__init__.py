"""What all stages share: run, lineage, progress, planning, reports, and the world that they may learn from.

The modules, in the order in which to read them:

    what a stage is       contract, run, world
    its data              data, lineage
    before it runs        planner, sizes, planning/
    while it runs         progress
    afterwards            reports/
"""
