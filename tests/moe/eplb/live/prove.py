"""The long forms of the tests of moving: ``python -m tests.moe.eplb.live.prove --ranks 4 --cycles 1000``, or ``--kills``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.moe.eplb.live.rebalances import rebalance
from tests.moe.eplb.live.test_killed import all_moments
from tests.ranks import run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", action="store_true", help="kill a rank at every moment of a cycle instead")
    args = parser.parse_args()
    if args.kills:
        with tempfile.TemporaryDirectory() as folder:
            all_moments(Path(folder), args.seed)
        return
    found = run_ranks(rebalance, args.ranks, args.cycles, args.seed, timeout=60 + 3.0 * args.cycles)
    assert len({str(each["slots"]) for each in found}) == 1, "ranks have different placements"
    first = found[0]
    print(f"{args.ranks} ranks: {first['ended']} cycles ended, {first['declined']} declined")
    print(f"{first['batches']} batches in {first['steps']} steps")
    print(f"longest cycle {first['longest']} steps, {sum(each['received'] for each in found)} experts received, {first['seconds']:.0f} s")
    print(f"grown in the second half: bytes {[each['grown_bytes'] for each in found]}, tensors {[e['grown_tensors'] for e in found]}")


if __name__ == "__main__":
    main()
