"""A server process for sweeps: ``python -m tests.launch.serve.stand_in --port P [--tensor-parallel-size N] [--data-parallel-size N]``.

It has one slot for each data-parallel rank, and tensor parallelism makes a token faster.
"""

import argparse
import asyncio
import sys

from tests.launch.serve.fake_server import FakeServer, completions


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--broken", action="store_true")
    args = parser.parse_args()
    if args.broken:
        sys.exit("no weights at all")
    gap = 0.04 / args.tensor_parallel_size
    server = FakeServer(lambda body: completions(body, wait=gap, gap=gap), slots=args.data_parallel_size, at=args.port)
    with server:
        asyncio.run(asyncio.sleep(300))


if __name__ == "__main__":
    main()
