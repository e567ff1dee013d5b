"""The environments that come with gspo_agent; importing `gspo_agent.env` makes their ids known to `gymnasium.make`."""

_ENTRY_POINTS = {
    "gspo_agent/Calculator-v0": "envs.calculator:Calculator",
    "gspo_agent/MathVerifier-v0": "envs.math_verifier:MathVerifier",
    "gspo_agent/CodeSandbox-v0": "envs.code_sandbox:CodeSandbox",
    "gspo_agent/Workspace-v0": "envs.code_sandbox:Workspace",
}


def register() -> None:
    """Registers the ids with Gymnasium, which calls this as a plugin in the versions that have plugins."""
    import gymnasium

    for id, entry_point in _ENTRY_POINTS.items():
        if id not in gymnasium.registry:
            gymnasium.register(id, entry_point=entry_point)
