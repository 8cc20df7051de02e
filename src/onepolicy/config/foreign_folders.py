"""Folders that trainers write for themselves, where a saved model is wanted."""

FOREIGN = {
    "adapter_config.json": "is an adapter of peft without its model; merge it: "
    "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(MERGED), "
    "and save the base's tokenizer there too",
    "model_world_size_*_rank_*.pt": "is a sharded checkpoint of verl; merge it: "
    "python -m verl.model_merger merge --backend fsdp --local_dir FOLDER --target_dir MERGED",
    "actor/model_world_size_*_rank_*.pt": "is a step of verl; merge its folder actor: "
    "python -m verl.model_merger merge --backend fsdp --local_dir actor --target_dir MERGED",
    "common.pt": "is a checkpoint of Megatron-core; export it: "
    "megatron.bridge.AutoBridge.from_hf_pretrained(BASE).export_ckpt(FOLDER, MERGED), "
    "or tools/convert_torch_dist_to_hf.py of slime",
    "latest_checkpointed_iteration.txt": "holds checkpoints of Megatron; export one: "
    "megatron.bridge.AutoBridge.from_hf_pretrained(BASE).export_ckpt(FOLDER, MERGED), "
    "or tools/convert_torch_dist_to_hf.py of slime",
    "*.distcp": "is a distributed checkpoint of torch; let its trainer save the model by "
    "save_pretrained",
}
"""Files by which a folder shows that a trainer wrote it for itself -> what to do."""
