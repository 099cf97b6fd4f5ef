"""A member in a process of its own, to be killed: ``python worker.py FOLDER MODE SEED``. It prints a line when it is in."""

import importlib.util
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
if importlib.util.find_spec("rorqual") is None:  # a bare checkout: the repository root is the package
    spec = importlib.util.spec_from_file_location("rorqual", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    sys.modules["rorqual"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["rorqual"])
sys.path.insert(0, str(ROOT))

from rorqual.attention.kv.directory import DirectoryFull  # noqa: E402
from rorqual.attention.kv.directory.host import Deadline  # noqa: E402
from tests.attention.kv.directory.common import SHARED, chain, content_of, member, right  # noqa: E402


def turn(one, rng, pause=0.0) -> None:
    """One request: take what is there, compute and publish the rest, let go. SystemExit(3) if a wrong byte is served."""
    hashes = chain(rng.randrange(24), rng.randrange(1, 13))
    found = one.match(hashes)
    if not right(one, hashes, found):
        raise SystemExit(3)
    rest = hashes[len(found) :]
    try:
        pages = one.allocate(len(rest))
    except DirectoryFull:
        one.release(found)
        return
    for page, name in zip(pages, rest, strict=True):
        content = content_of(name)
        for layer in range(len(content)):  # a kill in between leaves a torn page
            one.pool.bytes[layer, page] = content[layer]
            time.sleep(pause)
    one.publish(rest, pages, one.checksums(rest, pages), first=len(found))
    if not right(one, hashes, (*found, *pages)):
        raise SystemExit(3)
    one.release((*found, *pages))
    if rng.randrange(4) == 0:
        one.renew()


def main(folder: str, mode: str, seed: str) -> None:
    """``turns``: requests without end; ``own``: allocate 20 pages and wait; ``lock``: wait inside a transaction."""
    one, rng = member(Path(folder), SHARED), random.Random(int(seed))
    if mode == "own":
        pages = one.allocate(20)
        one.pool.bytes[:, list(pages)] = 0xAB
    if mode == "lock":
        with one._store.connection.transaction(Deadline(5)) as db:
            db.execute("UPDATE pages SET used = 1 WHERE state = 2")
            print("in", flush=True)
            time.sleep(60)
    print("in", flush=True)
    while True:
        if mode == "turns":
            turn(one, rng, 1e-5 * rng.randrange(3))
        else:
            time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
