"""What a rank does in each of PPO's phases, for tests of memory. Imports nothing, as tests/gpu needs it."""

PHASES = {  # phase by the method that is called
    "generate": "sample",
    "scores": "score",
    "reference_logprobs": "reference",
    "policy_logprobs": "measure",
    "values": "measure",
    "update_policy": "learn",
    "update_value": "learn",
}
