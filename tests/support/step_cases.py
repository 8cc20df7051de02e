"""The steps that are played on the emulated device: families, replay modes, corrections, formats.

A case is its name, "family variant variant ...".
"""

FAMILIES = ("qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "mixtral", "qwen3_dense")
MODES = {
    "off": ["replay.mode=off"],
    "r2": ["replay.mode=r2"],
    "r3": ["replay.mode=r3"],
    "soft": ["replay.mode=soft", "replay.ratio=0.5"],
    "weights": ["replay.mode=weights"],
}
CORRECTIONS = {
    "tis": ["correction.preset=tis"],
    "mis": ["correction.preset=mis"],
    "seq-mis": ["correction.preset=seq-mis"],
    "turn": ["correction.weight.level=turn", "correction.weight.high=2"],
    "trm": ["correction.preset=trm"],
    "m2po": ["correction.preset=m2po"],
    "opsm": ["correction.preset=opsm"],
    "kpop": ["correction.preset=kpop"],
    "bypass": ["correction.preset=ppo-is"],
    "dppo": ["correction.preset=dppo-tv", "objective.surrogate=pg"],
    "centering": ["correction.preset=score-centering", "objective.surrogate=pg"],
    "support": [
        "correction.preset=score-centering-tis",
        "correction.centering=support",
        "objective.surrogate=pg",
    ],
}
"""One of every kind: token, turn and sequence weights, bounds that clip or reject, gates on a
token, a sequence and a budget of the step, live ones, no old policy, the sampler's likeliest
tokens."""
OBJECTIVES = {
    "gspo": ["objective.preset=gspo"],
    "gspo-token": ["objective.preset=gspo", "objective.ratio_level=sequence-token"],
    "gmpo": ["objective.preset=gmpo"],
    "sapo": ["objective.preset=sapo"],
    "topr": ["objective.preset=topr", "correction.preset=ppo-is"],
    "critic": ["objective.preset=ppo", "objective.num_minibatches=3"],
    "kl-entropy": ["objective.kl.coef=0.1", "objective.entropy_coef=0.01"],
    "kl-reward": [
        "objective.preset=reinforce++",
        "objective.kl={coef = 0.1, where = 'reward', estimator = 'k1'}",
    ],
}
QUANT = {
    "int8": ["rollout.quant=int8"],
    "int8-static": ["rollout.quant={format = 'int8', activations = 'static'}"],
    "fp8": ["rollout.quant=fp8"],
    "fp8-weight": ["rollout.quant=fp8-weight"],
    "simulated": ["rollout.quant={format = 'simulated', bits = 6}"],
}
TRAINING = {
    "reuse": ["train.reuse_scoring_forward=true"],
    "chunks": ["train.logits_chunk=16"],
    "checkpointing": ["train.activation_checkpointing=true"],
    "fp32-head": ["model.lm_head=float32", "rollout.engine.lm_head=float32"],
    "bfloat16": ["model.dtype=bfloat16", "rollout.engine.dtype=bfloat16"],
    "pressure": ["rollout.pressure={scale = 0.1, seed = 1}"],
    "top-p": [f"rollout.sampling.{name}" for name in ("top_p=0.8", "top_k=30", "min_p=0.01")],
}
VARIANTS = MODES | CORRECTIONS | OBJECTIVES | QUANT | TRAINING


def overrides_of(variants: list[str]) -> list[str]:
    """Return the settings of a case's variants. Replay is off unless one of them names a mode."""
    settings = [setting for variant in variants for setting in VARIANTS[variant]]
    if not set(variants) & set(MODES):
        settings = MODES["off"] + settings
    other_routes = set(variants) & {*QUANT, "pressure"}  # than the trainer would choose
    if other_routes and set(variants) & {"r3", "soft", "weights"}:
        settings.append("replay.min_agreement=0")
    return settings


def mode_of(family: str) -> str:
    """Return the replay of a family in a case that is not about replay."""
    if family == "qwen3_dense":
        return "off"
    return "r3"


def trains(family: str, name: str) -> bool:
    """Return whether a family can have this variant. Only routers can be under pressure."""
    return family != "qwen3_dense" or name != "pressure"


FAST = [
    *(f"{family} {mode_of(family)} tis" for family in FAMILIES if family != "qwen3_moe"),
    "qwen3_moe r3 tis bfloat16",
    *(f"qwen3_moe {mode}" for mode in MODES if mode != "r3"),
    "deepseek_v3 weights seq-mis reuse",
    "gpt_oss soft opsm chunks",
    "qwen3_moe r3 critic m2po",
    "qwen3_moe r3 kl-entropy gspo",
    "qwen3_moe r3 centering",
    "qwen3_moe r3 int8-static mis",
    "olmoe r3 fp8",
    "qwen3_moe r3 tis top-p",
]
"""Every family, mode and kind of correction, and two formats: `make test`."""
WHOLE = "qwen3_moe"
"""The family of all corrections and objectives, which see log-probabilities and no model."""
SLOW = [
    *(f"{WHOLE} r3 {name}" for name in CORRECTIONS | OBJECTIVES),
    *(f"{f} {mode} tis" for f in FAMILIES for mode in MODES if f != "qwen3_dense"),
    *(f"{f} {mode_of(f)} {name}" for f in FAMILIES for name in TRAINING if trains(f, name)),
    *(f"{f} {mode_of(f)} tis {name}" for f in FAMILIES for name in QUANT),
]
"""Every correction and objective, and every family in every mode and format: `make test-all`."""
