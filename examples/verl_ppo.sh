#!/usr/bin/env bash
# verl 0.9.1 trains a MoE with GRPO on GSM8K: its vLLM returns the experts of every token, onepolicy's FSDP engine replays
# them, truncated importance sampling corrects the rest. Eight GPUs of 80 GB.
#
#   pip install verl==0.9.1 'vllm>=0.22' onepolicy pyarrow  # until the first release: the path of a clone
#   MODEL=Qwen/Qwen3-30B-A3B DATA=~/data/gsm8k examples/verl_ppo.sh  # train.parquet and test.parquet, as for any run of verl
#
# Only the lines between the two marks are onepolicy's. Further overrides go behind: examples/verl_ppo.sh trainer.nnodes=2
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}
DATA=${DATA:-$HOME/data/gsm8k}

# Several nodes: Ray's workers elsewhere need it too, so it is in ray_init below as well.
export VERL_ENGINE_VENDOR=onepolicy

OURS=(
  # --- onepolicy
  trainer.v1.trainer_mode=onepolicy_sync
  +trainer.onepolicy.correction=tis  # leave this line out where mismatch/k3 stays below 1e-3 with replay
  +trainer.onepolicy.dump="$PWD/dump"
  actor_rollout_ref.rollout.enable_rollout_routing_replay=true
  actor_rollout_ref.rollout.calculate_log_probs=true
  +ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR=onepolicy
  # ---
)

python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=256 \
  data.max_prompt_length=512 \
  data.max_response_length=2048 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.use_remove_padding=true \
  actor_rollout_ref.model.enable_gradient_checkpointing=true \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
  actor_rollout_ref.actor.fsdp_config.param_offload=true \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.total_epochs=1 \
  trainer.logger='["console"]' \
  "${OURS[@]}" \
  "$@"
