"""Tables and figure of lora_curves.py, and the rule by which LoRA learns like full training.

The rule was fixed before the first run. The rate of adapters was fixed twice: 3e-3, from one pilot,
lost half of the first run's reward, and 1e-3 took its place before any other run (the arm
`hf-lora-fast` keeps the first). A run's rise is the mean reward of its last BLOCK steps less
that of its first BLOCK. LoRA's reward rises as in the full run if, on the same engine, the mean rise
of its seeds is at least SHARE of the full runs', and no seed falls. Its k3 is the mean over steps and
seeds, and may be at most LARGEST_K3 times the full runs'.
"""

BLOCK, SHARE, LARGEST_K3 = 8, 0.5, 2.0
COMPARED = ("hf-full", "hf-lora", "vllm-full", "vllm-lora", "hf-lora-native")


def write_page(lines, page):
    raise NotImplementedError


def write_figure(lines, folder, *, png):
    raise NotImplementedError
