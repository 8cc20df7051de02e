"""A script: `colocate.py FOLDER [cut]` trains with GRPOTrainer and vLLM in its process, with R3.

cut: with top_p, top_k and min_p, and FOLDER/dump. FOLDER/log.json gets TRL's log. vLLM's CPU build
records routes in eager mode only, and TRL 1.16's weight sync fails on it (its parameters lose their
loaders), so onepolicy's own sync stands in.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from transformers import Qwen3MoeForCausalLM

import onepolicy.integrations.trl as op_trl
from onepolicy.models.checkpoint_names import CheckpointNames
from onepolicy.rollout.vllm.weights import reload_weights
from support.oracle.export_peers import tokenizer
from support.trl.tiny import make_trainer, tiny_moe, train


def sync(trainer):
    """Give the trainer's weights to its vLLM."""
    llm = trainer.vllm_generation.llm
    names = CheckpointNames(trainer.model.config, trust_remote_code=False)
    weights = names.stream_to_checkpoint(trainer.model.state_dict().items())
    llm.collective_rpc(reload_weights, args=(weights,))
    llm.reset_prefix_cache()


CUT = {"top_p": 0.8, "top_k": 20, "min_p": 0.01}


def main(folder: Path, *cut: str) -> None:
    changes, dump = {}, None
    if cut:
        changes, dump = CUT, folder / "dump"
    sizes = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
    tiny_moe(**sizes, max_position_embeddings=64).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    with op_trl.routed_vllm(enforce_eager=True):
        trainer = make_trainer(
            folder / "out",
            model=Qwen3MoeForCausalLM.from_pretrained(folder / "model"),
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=64,
            vllm_gpu_memory_utilization=0.1,
            **changes,
        )
    trainer.vllm_generation.sync_weights = lambda: sync(trainer)
    op_trl.attach(trainer, native_every=1, correction="tis", dump=dump)
    (folder / "log.json").write_text(json.dumps(train(trainer)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
