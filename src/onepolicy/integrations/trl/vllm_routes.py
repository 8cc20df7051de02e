"""Routes and supports of TRL's two vLLM modes, which TRL itself neither asks for nor keeps.

Colocate: TRL builds `LLM(...)` from a fixed list of arguments in the trainer's constructor, so the
name is replaced while the trainer is built. Server: start it with --enable-return-routed-experts;
the routes come with every reply of /v1/completions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from onepolicy.config import UsageError
from onepolicy.integrations.trl.ranks import broadcast_json
from onepolicy.integrations.trl.route_book import RouteBook, SampledPath
from onepolicy.integrations.trl.supports import Likeliest
from onepolicy.support.trace import SupportTrace

COMPLETIONS = ("/v1/completions", "/inference/v1/generate")


@contextmanager
def routed_vllm(**arguments: Any) -> Iterator[None]:
    """Make every `LLM` that TRL builds in this context return its routes.

        with op_trl.routed_vllm():
            trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate"))
        op_trl.attach(trainer)

    Args:
        arguments: more arguments of `LLM`, for which TRL has no setting. The CPU build of vLLM
            records routes with `enforce_eager=True` only. Without `max_logprobs` there is no limit,
            as supports need more than vLLM's 20.

    Raises:
        UsageError: vLLM is not installed.
    """
    from trl.generation import vllm_generation

    original = getattr(vllm_generation, "LLM", None)
    if original is None:
        raise UsageError("routed_vllm: TRL found no vLLM; pip install 'trl[vllm]'")
    arguments = {"max_logprobs": -1, "enable_return_routed_experts": True} | arguments
    vllm_generation.LLM = functools.partial(original, **arguments)
    try:
        yield
    finally:
        vllm_generation.LLM = original


def returns_routes(llm: Any) -> bool:
    """Return whether a vLLM `LLM` was built to return routes."""
    config = llm.llm_engine.model_config
    return bool(getattr(config, "enable_return_routed_experts", False))


def watch_colocated(llm: Any, book: RouteBook) -> None:
    """Put the routes of every later `llm.generate` into the book."""
    original = llm.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        for request in outputs:
            for output in request.outputs:
                routes = getattr(output, "routed_experts", None)
                book.add(request.prompt_token_ids, output.token_ids, routes=routes)
        return outputs

    llm.generate = generate


def watch_client(client: Any, book: RouteBook) -> None:
    """Put the routes of every later reply to TRL's VLLMClient into the book."""
    original = client._post

    def post(url: str, **kwargs: Any) -> dict[str, Any]:
        reply: dict[str, Any] = original(url, **kwargs)
        if url.endswith(COMPLETIONS):
            for choice in reply["choices"]:
                _add_choice(book, choice, kwargs["json"])
        return reply

    client._post = post


def _add_choice(book: RouteBook, choice: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Add one completion. With images the server does not repeat the prompt's tokens."""
    prompt = choice.get("prompt_token_ids", request.get("token_ids"))
    if prompt is not None:
        book.add(prompt, choice["token_ids"], routes=choice.get("routed_experts"))


def watch_generation(generation: Any, book: RouteBook, *, supports: bool) -> None:
    """Add the log-probabilities of every later call of TRL's VLLMGeneration to the book.

    In server mode only the main process talks to the server; the others get its routes here.
    supports: it returns the likeliest tokens (`ask_vllm`), of which TRL then gets the sampled one.
    """
    original = generation.generate
    is_server = generation.mode == "server"

    def generate(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if is_server and generation.accelerator.num_processes > 1:
            _share_routes(generation.accelerator, book)
        prompts, completions, logprobs = made[:3]
        if logprobs is None:
            return made
        sampled = [[value[0] for value in values] for values in logprobs]
        kept: list[SupportTrace | None] = [None] * len(sampled)
        if supports:
            listed = [Likeliest(*each) for each in zip(logprobs, made[3], strict=True)]
            kept = [each.support() for each in listed]
            sampled = [one.of(ids) for one, ids in zip(listed, completions, strict=True)]
        for path in zip(prompts, completions, sampled, kept, strict=True):
            book.add(*path[:2], logp=path[2], support=path[3])
        if not supports:
            return made
        of_sampled = [[[token] for token in ids] for ids in completions]
        return prompts, completions, [[[each] for each in row] for row in sampled], of_sampled

    generation.generate = generate


def _share_routes(accelerator: Any, book: RouteBook) -> None:
    """Send the paths of the main process's last call to all others."""
    own = None
    if accelerator.is_main_process:
        own = [(path.tokens, path.prompt, path.routes) for path in book.take_routed()]
    paths = broadcast_json(accelerator, own)
    if not accelerator.is_main_process:
        book.extend([SampledPath(tuple(tokens), *rest) for tokens, *rest in paths])
