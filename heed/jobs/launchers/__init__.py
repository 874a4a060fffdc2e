"""Clusters that `heed submit` can ask for machines: Slurm, Kubernetes (KubeRay), and clouds through SkyPilot."""
