"""What all stages share: run, lineage, progress, reports, what `heed plan` reads, and the world that they learn from.

The modules, in the order in which to read them:

    what a stage is       contract, run, world
    its data              data, lineage
    before it runs        plan (what it will do), sizes (of its data)
    while it runs         progress
    afterwards            reports/
"""
