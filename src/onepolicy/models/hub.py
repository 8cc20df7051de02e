"""The model hub, asked once whether it can be reached."""

from __future__ import annotations

from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_url,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.constants import CONFIG_NAME, ENDPOINT
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from onepolicy.config import UsageError


def check_reachable(path: str) -> None:
    """Raise UsageError if the model `org/name` is not cached and the hub cannot be reached.

    This takes one attempt. transformers would make five more with growing pauses, 40 s in all, and
    print each.
    """
    from httpx2 import TransportError  # of huggingface_hub 2, which brings it

    if is_offline_mode():
        return
    if isinstance(try_to_load_from_cache(path, CONFIG_NAME), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, CONFIG_NAME))
    except TransportError as error:
        raise UsageError(
            f"model.path: there is no folder {path}, and {ENDPOINT} cannot be reached for a model "
            f"of that name ({error}); give a folder, or run `hf download {path}` where there is a "
            "network"
        ) from None
    except (HfHubHTTPError, HFValidationError):  # transformers explains these
        return
