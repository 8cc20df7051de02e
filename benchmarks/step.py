"""A whole GRPO step beside TRL's: same policy, prompts and threads, one step of each in turn.

    pip install trl==1.16.0
    python benchmarks/step.py --threads 1
    python benchmarks/step.py --workload 512+128 --dtype bfloat16 --trl-dtype bfloat16
    python benchmarks/step.py --trl-continuous-batching
    python benchmarks/step.py --trl-vllm --trl-dtype bfloat16
    python benchmarks/step.py --source ../before      # our side of another source tree too

Both sides train in fp32. --dtype is that of our rollouts and --trl-dtype that of TRL's, fp32 each
by default: TRL samples from the model that it trains. With --trl-dtype bfloat16 it samples from a
bf16 copy of it, which TRL has no setting for; with --trl-vllm it is vLLM's dtype. Ours records and
replays routes (R3) and measures the mismatch; TRL does neither, its load-balancing loss is off, and
with vLLM its correction is, so that it does not score.

Workloads: 26+75 is 8 problems with 8 completions each that end by themselves after about 75 tokens.
512+128 and 128+1000 are 4 problems with 8 completions each; every prompt and every completion has
that many tokens, and rewards differ within a group. All of them use the policy of --model (`tiny`:
8 layers of 32 experts, 3.6M parameters), whose shape is printed.

TRL's weight sync to vLLM fails on vLLM's CPU build, so ours stands in for it
(tests/support/trl/colocate.py).

Prints for each of our sides medians and the range of the rounds: seconds per step / TRL's, the same
of CPU seconds (which other work on the machine moves less), and of seconds per sampled token.
"""

import argparse
import functools
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from step_ours import GROUP, PARTS, Options, OtherTree, Ours, Step, now, parity, since


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="tiny", help="policy folder (default: the one make-policy made)"
    )
    parser.add_argument(
        "--steps", type=int, default=6, help="counted steps of each, after the warm-up"
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        default=0,
        help="steps not counted (default 1, with --trl-vllm 3: vLLM compiles in its first ones)",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--workload",
        default="26+75",
        choices=["26+75", "512+128", "128+1000"],
        help="tokens of a prompt and of a completion",
    )
    parser.add_argument(
        "--problems", type=int, default=0, help="of a step (default: the workload's)"
    )
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="of our rollouts")
    parser.add_argument("--trl-dtype", default="float32", choices=dtypes, help="of TRL's rollouts")
    sampler = parser.add_mutually_exclusive_group()
    sampler.add_argument(
        "--trl-continuous-batching",
        action="store_true",
        help="TRL samples by transformers' paged attention with continuous batching",
    )
    sampler.add_argument(
        "--trl-vllm", action="store_true", help="TRL samples by vLLM in the same process"
    )
    parser.add_argument(
        "--trl-vllm-eager", action="store_true", help="this vLLM compiles nothing (enforce_eager)"
    )
    for name, whose in (("--set", "ours"), ("--source-set", "the run of --source")):
        parser.add_argument(
            name,
            nargs="*",
            default=[],
            metavar="PATH=VALUE",
            help=f"settings of {whose} on top, such as train.reuse_scoring_forward=false",
        )
    parser.add_argument(
        "--source", type=Path, help="another source tree, whose steps are measured too"
    )
    given = parser.parse_args()
    given.warm_up = given.warm_up or (3 if given.trl_vllm else 1)
    return given


args = arguments()
os.environ.update(
    OMP_NUM_THREADS=str(args.threads), OMP_WAIT_POLICY="passive", TOKENIZERS_PARALLELISM="false"
)
if args.trl_vllm:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",  # GiB
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

STEPS = args.warm_up + args.steps
OPTIONS = Options(
    args.model, args.workload, STEPS, args.threads, args.dtype, args.set, args.problems
)
PROMPT, NEW_TOKENS = OPTIONS.lengths


class TokenCount:
    """TRL's reward function, which counts the tokens of its batches."""

    __name__ = "reward"

    def __init__(self, answers: dict[str, str], tokenizer) -> None:
        self.answers, self.tokenizer = answers, tokenizer
        self.prompt = self.completion = 0  # of the last batch

    def __call__(self, prompts, completions, completion_ids, **_) -> list[float]:
        self.prompt = sum(len(self.tokenizer(prompt)["input_ids"]) for prompt in prompts)
        self.completion = sum(map(len, completion_ids))
        if OPTIONS.forced:
            return [parity(ids) for ids in completion_ids]
        pairs = zip(prompts, completions, strict=True)
        return [float(c.rsplit("#", 1)[-1] == self.answers[p]) for p, c in pairs]


class InTurn(TrainerCallback):
    """A callback that runs a step of each of our sides after every TRL step."""

    def __init__(self, sides: dict[str, Ours | OtherTree], count: TokenCount) -> None:
        self.sides, self.count = sides, count
        self.trl: list[Step] = []
        self.sampled_from: set[torch.dtype] = set()  # of the logits of TRL's copy
        self.found: dict[str, list[Step]] = {name: [] for name in sides}

    def on_step_begin(self, *_, **__) -> None:
        self.begun = now()

    def on_step_end(self, *_, **__) -> None:
        self.trl.append(Step(*since(self.begun), self.count.prompt, self.count.completion))
        torch.set_num_threads(args.threads)
        for name, side in self.sides.items():
            self.found[name].append(side.step())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(OPTIONS, folder)
        sides: dict[str, Ours | OtherTree] = {"onepolicy": ours}
        if args.source is not None:
            other = Options(**vars(OPTIONS) | {"settings": args.source_set})
            sides[str(args.source)] = OtherTree(args.source, other)
        turns = compare(folder, ours, sides)
        if args.source is not None:
            sides[str(args.source)].close()
    report(ours, turns)


def compare(folder: str, ours: Ours, sides: dict[str, Ours | OtherTree]) -> InTurn:
    """Train with TRL, and run a step of each of our sides after every step of it."""
    environment, count = ours.parts.environment, OPTIONS.num_problems * STEPS
    problems = [environment.train_problem(i) for i in range(count)]
    answers = {problem.prompt: problem.answer for problem in problems}
    turns = InTurn(sides, TokenCount(answers, ours.tokenizer))
    with vllm_of_this_benchmark():
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(ours.path, dtype=torch.float32),
            reward_funcs=turns.count,
            args=trl_settings(folder),
            train_dataset=Dataset.from_list([{"prompt": problem.prompt} for problem in problems]),
            processing_class=ours.tokenizer,
            callbacks=[turns],
        )
    assert not trainer.aux_loss_enabled, (
        "TRL would also train the router's load balancing, which is more work"
    )
    if args.trl_vllm:
        trainer.vllm_generation.sync_weights = functools.partial(give_weights, trainer)
    elif args.trl_dtype == "bfloat16":
        sample_from_copy(trainer, turns)
    trainer.train()
    if args.trl_dtype == "bfloat16" and not args.trl_vllm:
        assert turns.sampled_from == {torch.bfloat16}, f"TRL has sampled from {turns.sampled_from}"
    assert not trainer._metrics["train"].get("aux_loss"), "TRL has logged a load-balancing loss"
    return turns


def trl_settings(folder: str) -> GRPOConfig:
    generation, sampler = {}, {}
    if OPTIONS.forced:
        generation = {"min_tokens" if args.trl_vllm else "min_new_tokens": NEW_TOKENS}
    if args.trl_vllm:
        sampler = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": OPTIONS.max_len,
            "vllm_gpu_memory_utilization": 0.1,
            "vllm_importance_sampling_correction": False,
        }
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=OPTIONS.num_problems * GROUP,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        generation_kwargs=generation,
        max_steps=STEPS,
        learning_rate=1e-5,
        beta=0.0,
        # here: the trainer reads it once, when it is made; ours has no such loss
        router_aux_loss_coef=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        use_transformers_continuous_batching=args.trl_continuous_batching,
        model_init_kwargs=None,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        shuffle_dataset=False,
        **sampler,
    )


@contextmanager
def vllm_of_this_benchmark() -> Iterator[None]:
    """Give the `LLM` that TRL builds in this context arguments that TRL has no setting for."""
    if not args.trl_vllm:
        yield
        return
    from trl.generation import vllm_generation

    own = vllm_generation.LLM
    vllm_generation.LLM = functools.partial(
        own, dtype=args.trl_dtype, enforce_eager=args.trl_vllm_eager
    )
    try:
        yield
    finally:
        vllm_generation.LLM = own


def give_weights(trainer: GRPOTrainer) -> None:
    """Give the trainer's weights to its vLLM by our sync."""
    from onepolicy.models.checkpoint_names import CheckpointNames
    from onepolicy.rollout.vllm.weights import reload_weights

    llm = trainer.vllm_generation.llm
    names = CheckpointNames(trainer.model.config, trust_remote_code=False)
    weights = names.stream_to_checkpoint(trainer.model.state_dict().items())
    llm.collective_rpc(reload_weights, args=(weights,))
    llm.reset_prefix_cache()


def sample_from_copy(trainer: GRPOTrainer, turns: InTurn) -> None:
    """Let TRL sample from a bf16 copy of its model, which gets its weights before each batch."""
    from trl.trainer import grpo_trainer

    copied = AutoModelForCausalLM.from_pretrained(trainer.model.name_or_path, dtype=torch.bfloat16)
    copied.lm_head.register_forward_hook(lambda *given: turns.sampled_from.add(given[-1].dtype))

    @contextmanager
    def unwrap(*_, **__) -> Iterator[torch.nn.Module]:
        copied.load_state_dict(trainer.model.state_dict())
        yield copied

    grpo_trainer.unwrap_model_for_generation = unwrap


def report(ours: Ours, turns: InTurn) -> None:
    sampler = "generate"
    if args.trl_continuous_batching:
        sampler = "paged generation"
    if args.trl_vllm:
        sampler = "vLLM in the process" + ", eager" * args.trl_vllm_eager
    print(
        f"{args.workload} tokens, {OPTIONS.num_problems * GROUP} samples, threads {args.threads}, "
        f"median of {args.steps} steps (lowest to highest), load {os.getloadavg()[0]:.1f}"
    )
    print(f"policy {args.model}: {shape_of(ours)}")
    print(f"both train in float32; rollouts: ours {args.dtype}, TRL's {args.trl_dtype} ({sampler})")
    trl = turns.trl[args.warm_up :]
    print(describe("TRL", trl))
    for name, steps in turns.found.items():
        counted = steps[args.warm_up :]
        print(describe(name, counted))
        rounds = list(zip(counted, trl, strict=True))
        print(f"  step / TRL's               {middle([o.wall / t.wall for o, t in rounds])}")
        print(f"  CPU seconds / TRL's        {middle([o.cpu / t.cpu for o, t in rounds])}")
        tokens = [o.wall / o.completion / (t.wall / t.completion) for o, t in rounds]
        print(f"  per sampled token / TRL's  {middle(tokens)}")
        total = statistics.median(step.wall for step in counted)
        for part in PARTS:
            seconds = statistics.median(step.parts[part] for step in counted)
            print(f"  {part:<8} {seconds:.2f} s  {seconds / total:.0%}")


def shape_of(ours: Ours) -> str:
    config = ours.parts.learner.model.config
    return (
        f"{config.num_hidden_layers} layers of width {config.hidden_size}, top "
        f"{config.num_experts_per_tok} of {config.num_experts} experts"
    )


def describe(name: str, steps: list[Step]) -> str:
    seconds, prompt, completion = (
        statistics.median(getattr(step, key) for step in steps)
        for key in ("wall", "prompt", "completion")
    )
    return (
        f"{name}: {seconds:.2f} s per step, {prompt:.0f} tokens of prompts, "
        f"{completion:.0f} sampled"
    )


def middle(values: list[float]) -> str:
    """Return the median and the range of the rounds."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
