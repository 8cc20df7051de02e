"""The server of fake_vllm.py in a process of its own, which a test can kill.

python -m support.fake_vllm_process PORT MODEL SECONDS MAX_LEN: on this port, of a turn so many
seconds, of a path so many tokens.
"""

import sys
import threading
import time

from onepolicy.config import ModelConfig
from onepolicy.config.input_files import resolve_model
from onepolicy.models.load import read_config
from onepolicy.rollout.vllm.worker import model_shape
from support.fake_vllm import GENERATE, FakeVLLM


def main(port, model, seconds, max_len):
    shape = model_shape(read_config(resolve_model(ModelConfig(path=model))).get_text_config())

    def slowly(reply, number):
        time.sleep(float(seconds))
        return reply

    fake = FakeVLLM(model, shape, told={"max_len": int(max_len)}, spoil={GENERATE: slowly})
    fake.server.port = int(port)
    with fake.server:
        print("ready", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
