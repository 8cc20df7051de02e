"""Learning curves of the objectives: one policy and one task (recipes/gym_spell_backward.toml), the
learning rate of the recipe, replay on; every objective on a few seeds. Finished runs are kept, an
interrupted one is resumed.

    python benchmarks/objective_curves.py                # all of OBJECTIVES, seeds 0 1 2
    python benchmarks/objective_curves.py ppo --seeds 0
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gym_curves import HEADER, ROOT, figures, make_policy, train

RECIPE = ROOT / "recipes" / "gym_spell_backward.toml"
TWO = (
    "objective.num_minibatches=2",
    "train.reuse_scoring_forward=false",
)  # or the PPO ratio would be 1 throughout
OBJECTIVES = {
    "grpo": TWO,
    "gspo": TWO,
    "reinforce++": TWO,
    "ppo": (*TWO, "objective.critic.lr=1e-3"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("objectives", nargs="*", choices=[[], *OBJECTIVES], help="default: all")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument(
        "--policies", type=Path, help="folder of the policy (default: where the recipe points)"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    policy = make_policy(RECIPE, options.policies, options.threads)
    print(
        "| " + " | ".join(("objective", *HEADER[1:])) + " |\n|" + " --- |" * len(HEADER), flush=True
    )
    for name in options.objectives or OBJECTIVES:
        for seed in options.seeds:
            run = options.out / f"{name}-seed{seed}"
            train_with(name, policy, run, seed, options.threads)
            print("| " + " | ".join((name, str(seed), *figures(run))) + " |", flush=True)


def train_with(name: str, policy: Path, run: Path, seed: int, threads: int) -> None:
    train(RECIPE, policy, run, seed, threads, (f"objective.preset={name}", *OBJECTIVES[name]))


if __name__ == "__main__":
    main()
