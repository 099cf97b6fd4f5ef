"""``python -m tests.server.parsers.long_splits --texts 100000``: the property of test_splits.py over many more texts."""

from __future__ import annotations

import argparse
import random

from rorqual.engine.server.parsers import REASONING_FORMATS, TOOL_FORMATS, ParserNames, make_parser
from tests.server.parsers.test_splits import SNIPPETS
from tests.server.parsers.whole import TOOLS, parse


def check(rng: random.Random) -> int:
    """One text, cut three ways; returns its calls."""
    text = "".join(rng.choice(SNIPPETS) for _ in range(rng.randrange(40)))
    names = ParserNames(reasoning=rng.choice([None, *REASONING_FORMATS]), tools=rng.choice([None, *TOOL_FORMATS]))
    prompt, parallel = rng.choice(["", "<think>", "</think>"]), rng.random() < 0.8

    def message(pieces: list[str]) -> tuple[object, ...]:
        made = make_parser(names, prompt=prompt, tools=TOOLS if names.tools else (), parallel_tool_calls=parallel)
        return parse(made, pieces).parts()

    whole = message([text])
    places = sorted({rng.randrange(len(text) + 1) for _ in range(rng.randrange(8))} | {0, len(text)})
    for pieces in (list(text), [text[a:b] for a, b in zip(places, places[1:], strict=False)]):
        assert message(pieces) == whole, (names, prompt, parallel, text, pieces, whole)
    return len(whole[2])  # type: ignore[arg-type]


def main() -> None:
    """Run it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--texts", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    rng = random.Random(args.seed)
    calls = sum(check(rng) for _ in range(args.texts))
    print(f"{args.texts} texts, {calls} calls in them: the same message however they were cut")


if __name__ == "__main__":
    main()
