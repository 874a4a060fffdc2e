"""Policy gradients against a reward: PPO, and algorithms without a value function (docs/algorithms.md).

The modules, in the order in which to read them:

    the stage             config, placement (settings of ranks and samplers), stage, plan, report
    its prompts           prompts (several sources, and the order in which iterations draw)
    training              loop (all iterations), controller (one iteration), experience (its scored rollouts)
    the equations         algorithm, groups
    the roles             roles, rollout (what they exchange), generator, scorer, learner, rank (what they share)
    continuous sampling   schedule, rounds
    mixtures of experts   routes
    less memory and time  kept_passes, shared_body
    reward hacking        alarm, people
    records of rollouts   rollout_log
    conversations         environments/
"""
