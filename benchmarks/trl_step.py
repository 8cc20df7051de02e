"""A step of TRL's GRPOTrainer with onepolicy attached, beside the same step without.

    pip install trl==1.16.0
    python benchmarks/trl_step.py --threads 1

Several trainers of equal models take turns, one step each, so that other work on the machine meets
all of them. All get the same 64 samples of 75 new tokens from a function that has them ready, so a
step is TRL's scoring and update alone: the smallest base that the adapter can be divided by.
CPU seconds are those of the trainer's own thread, so they say all with one thread only. Attached
means: R3, TIS, metrics, and a dump with the routes of both sides.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import threading
import time
import types


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=9, help="counted steps (2 or more)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    return parser.parse_args()


args = arguments()
os.environ.update(
    OMP_NUM_THREADS=str(args.threads), OMP_WAIT_POLICY="passive", TRL_EXPERIMENTAL_SILENCE="1"
)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

import onepolicy as op  # noqa: E402
import onepolicy.integrations.trl as op_trl  # noqa: E402

PROMPT, NEW_TOKENS, SAMPLES, GROUP = 20, 75, 64, 8
WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(254))]
ATTACHED = {"correction": "tis", "dump": True}
CASES = {  # name: does TRL score, settings of attach or None
    "TRL scores": (True, None),
    "TRL scores, attached": (True, ATTACHED),
    "aligned": (False, None),
    "aligned, attached": (False, ATTACHED),
    "aligned, attached, in the training forward": (
        False,
        {"correction": "tis", "scoring": "training-forward"},
    ),
}
PAIRS = (
    ("TRL scores, attached", "TRL scores"),
    ("aligned, attached", "aligned"),
    ("aligned, attached, in the training forward", "aligned"),
)


def make_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=args.experts,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        initializer_range=0.1,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


@torch.no_grad()
def sample() -> dict[str, list]:
    """Return 64 random paths with the routes and log-probabilities of a bfloat16 copy."""
    model = make_model().bfloat16()
    prompts = torch.arange(2, 2 + PROMPT).repeat(SAMPLES, 1)
    ids = torch.cat([prompts, torch.randint(2, len(WORDS), (SAMPLES, NEW_TOKENS))], 1)
    routers = op.bind_routers(model)
    with routers.record() as tape:
        logits = model(input_ids=ids).logits[:, PROMPT - 1 : -1].float()
    traces = op.unpad_routes(tape.trace(), torch.ones_like(ids))
    logp = logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]
    return {
        "prompt_ids": prompts.tolist(),
        "completion_ids": ids[:, PROMPT:].tolist(),
        "logprobs": logp.tolist(),
        "routed_experts": [trace.ids[:-1].numpy() for trace in traces],
    }


class InTurn(TrainerCallback):
    """Steps of one trainer, each after its predecessor's."""

    def __init__(self, before: threading.Semaphore, after: threading.Semaphore) -> None:
        self.before, self.after = before, after
        self.seconds: list[float] = []
        self.cpu: list[float] = []  # of this trainer's thread

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.before.acquire()
        self.begun = time.perf_counter(), time.thread_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.perf_counter() - self.begun[0])
        self.cpu.append(time.thread_time() - self.begun[1])
        self.after.release()


def make_trainer(folder: str, rollouts: dict[str, list], scores: bool) -> GRPOTrainer:
    prompt = " ".join(WORDS[2 : 2 + PROMPT])
    trainer = GRPOTrainer(
        model=make_model(),
        reward_funcs=lambda completion_ids, **_: [float(ids[0] % 7) for ids in completion_ids],
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=SAMPLES,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            max_steps=args.steps + 1,
            learning_rate=1e-6,
            router_aux_loss_coef=0.0,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=10**6,
        ),
        train_dataset=Dataset.from_dict({"prompt": [prompt] * SAMPLES}),
        processing_class=make_tokenizer(),
        rollout_func=lambda *_: copy.copy(rollouts),
    )
    if scores:  # TRL scores and corrects where the sampler is vLLM
        trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_mode = True, -1, "colocate"
        trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)
    return trainer


def run(folder: str) -> dict[str, InTurn]:
    """Return each case with its seconds per step, the warm-up first."""
    torch.set_num_threads(args.threads)
    rollouts, turns, threads = sample(), {}, []
    batons = [threading.Semaphore(0) for _ in CASES]
    for number, (name, (scores, settings)) in enumerate(CASES.items()):
        trainer = make_trainer(f"{folder}/{number}", rollouts, scores)
        if settings is not None:
            given = dict(settings)
            if given.pop("dump", False):
                given["dump"] = f"{folder}/dump{number}"
            op_trl.attach(trainer, **given)
        turns[name] = InTurn(batons[number], batons[(number + 1) % len(batons)])
        trainer.add_callback(turns[name])
        threads.append(threading.Thread(target=trainer.train))
    for thread in threads:
        thread.start()
    batons[0].release()
    for thread in threads:
        thread.join()
    return turns


def ratios(one: list[float], other: list[float]) -> str:
    low, middle, high = statistics.quantiles(
        [a / b for a, b in zip(one[1:], other[1:], strict=True)], n=4
    )
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        turns = run(folder)
    for name, turn in turns.items():
        print(f"{statistics.median(turn.seconds[1:]):6.2f} s a step: {name}")
    print("ratios, step by step: median and quartiles, of seconds; of CPU seconds")
    for name, base in PAIRS:
        one, other = turns[name], turns[base]
        wall, cpu = ratios(one.seconds, other.seconds), ratios(one.cpu, other.cpu)
        print(f"{wall}; {cpu}  {name} / {base}")


if __name__ == "__main__":
    main()
