"""An engine in a process of its own that shares a pool file: computes prompts again and again until it is told to end, or killed.

``python -m tests.sharing.process FOLDER CHECKPOINT`` reads prompts as JSON lines from standard input; for each it writes
the tokens and how many were cached, and ``begun`` first.
"""

from __future__ import annotations

import json
import sys

from rorqual import LLM, SamplingParams
from rorqual.attention.kv.directory import DirectoryLimits
from rorqual.engine.sharing import place, questions


def be_patient() -> None:
    """However busy the machine is, answers are waited for; what a killed engine leaves behind comes back soon."""
    place.LIMITS = DirectoryLimits(call=10.0, verify=60.0, lease=1.0)
    questions.PATIENCE_S = 60.0


def main() -> None:
    folder, checkpoint = sys.argv[1:]
    be_patient()
    llm = LLM(
        checkpoint, skip_tokenizer_init=True, dtype="float32", disable_log_stats=True, page_size=4, max_total_tokens=240, max_num_seqs=5,
        max_num_batched_tokens=32, kv_offload="hybrid", kv_device_tokens=100, kv_host_backing="file", kv_host_path=f"{folder}/pool",
        kv_host_memory=0.04, kv_prefix_directory=True,
    )  # fmt: skip
    print(json.dumps("begun"), flush=True)
    for line in sys.stdin:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        for chunk in llm.generate_stream([json.loads(line)], params):
            if chunk.output is not None:
                found = chunk.output
                print(json.dumps([found.outputs[0].token_ids, found.metrics.cached_tokens]), flush=True)
            elif len(chunk.token_ids):
                print(json.dumps("token"), flush=True)
    llm.close()


if __name__ == "__main__":
    main()
