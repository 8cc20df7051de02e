"""A recipe of a few fast steps on a small policy, for tests of several folders."""


def write_recipe(policy, *lines, folder=None):
    """Write the recipe with these extra lines into a folder, by default beside the policy.

    Return its path.
    """
    path = (folder or policy.parent) / "recipe.toml"
    common = f"""
    out = "set by the test"
    model = {{ path = "{policy}" }}
    task = {{ kind = "chain", ops = 2 }}
    rollout.prompts_per_step = 2
    rollout.group_size = 4
    rollout.sampling = {{ max_tokens = 20 }}
    rollout.engine = {{ max_num_seqs = 8 }}
    optim = {{ lr = 1e-3 }}
    # every step changes the weights, also where all rewards are equal
    objective = {{ entropy_coef = 0.01 }}
    checkpoint = {{ every = 2 }}
    """
    path.write_text("\n".join([common, *lines]))
    return path
