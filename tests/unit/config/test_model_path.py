"""Folders that are no model yet are named, with what makes a model of them."""

import pytest

from onepolicy.config import UsageError
from onepolicy.config.input_files import check_model_path


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_config.json", r"an adapter of peft.*merge_and_unload"),
        ("model_world_size_8_rank_0.pt", r"verl.*python -m verl\.model_merger merge"),
        ("actor/model_world_size_8_rank_0.pt", r"a step of verl.*--local_dir actor"),
        ("common.pt", r"Megatron-core.*export_ckpt"),
        ("latest_checkpointed_iteration.txt", r"Megatron.*export_ckpt"),
        ("__0_0.distcp", r"distributed checkpoint of torch"),
        ("other", r"has no config\.json"),
    ],
)
def test_what_is_no_model_is_named(tmp_path, file, said):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(UsageError, match=said):
        check_model_path(str(tmp_path))
    (tmp_path / "config.json").touch()
    check_model_path(str(tmp_path))
