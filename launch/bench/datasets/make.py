"""From flags to requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...prompts import PromptItem, read_prompts
from .config import DatasetConfig
from .multi_turn import multi_turn_requests
from .random_ids import as_text, random_requests
from .request import Decode, Encode, Request, check_least
from .shared_prefix import shared_prefix_requests
from .sharegpt import sharegpt_requests
from .trace import trace_requests

#: requests, where neither flag nor dataset says
COUNT = 1000
OUTPUT_LEN = 128
NEED_FILE = ("file", "sharegpt", "timed_trace", "mooncake")
#: datasets whose prompts are token ids whatever the target takes
ONLY_IDS = ("random-ids",)


class Words:
    """How text and ids go together; without a tokenizer there are ids only."""

    def __init__(self, vocab_size: int | None, encode: Encode | None = None, decode: Decode | None = None) -> None:
        self._vocab_size = vocab_size
        self._encode = encode
        self.decode = decode

    @property
    def vocab_size(self) -> int:
        """Ids are below it; ValueError when nobody knows."""
        if self._vocab_size is None:
            raise ValueError("how many token ids the model has is not known; give --vocab-size N or --tokenizer FOLDER")
        return self._vocab_size

    @property
    def encode(self) -> Encode:
        """Text to ids; ValueError without a tokenizer."""
        if self._encode is None:
            raise ValueError("this dataset is text and needs a tokenizer; give --tokenizer FOLDER (leave out --skip-tokenizer-init)")
        return self._encode

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer."""
        return self._encode is not None and self.decode is not None


def dataset_of(config: DatasetConfig) -> str:
    """The dataset's name; ValueError when it needs a file and has none, or the other way round."""
    name = config.dataset_name or ("file" if config.dataset_path is not None else "random")
    if name in NEED_FILE and config.dataset_path is None:
        raise ValueError(f"--dataset {name} needs --dataset-path FILE")
    if config.dataset_path is not None and name not in NEED_FILE:
        if config.dataset_name == "random":  # as before there were other datasets: a path says what is meant
            return "file"
        raise ValueError(f"--dataset {name} takes no --dataset-path; those that do are {', '.join(NEED_FILE)}")
    return name


def make_requests(
    config: DatasetConfig, words: Words, *, seed: int, input_len: int, item_ids: Callable[[PromptItem], list[int]] | None = None
) -> list[Request]:
    """The requests that the flags ask for.

    Args:
        input_len: tokens of a random prompt when no flag says.
        item_ids: token ids of a prompt of a file; None: text is encoded, and conversations are refused.

    Raises:
        ValueError: a setting or a file is wrong.
    """
    name = dataset_of(config)
    count = COUNT if config.num_prompts is None else config.num_prompts
    check_least("num-prompts", count, 1)
    if config.output_len is not None:
        check_least("output-len", config.output_len, 1)
    path = config.dataset_path or ""
    if name in ("random", "random-ids"):
        return random_requests(
            count=count, input_len=input_len if config.input_len is None else config.input_len, output_len=config.output_len or OUTPUT_LEN,
            range_ratio=config.random_range_ratio, vocab_size=words.vocab_size, seed=seed, prefix_len=config.random_prefix_len,
        )  # fmt: skip
    if name == "file":
        return file_requests(path, count=count, output_len=config.output_len or OUTPUT_LEN, encode=item_ids or _plain(words))
    if name == "sharegpt":
        return sharegpt_requests(
            path, count=count, output_len=config.output_len, seed=seed, encode=words.encode, shuffle=not config.disable_shuffle,
            oversample=not config.no_oversample,
        )  # fmt: skip
    return _of_many_parts(name, config, words, seed)


def _of_many_parts(name: str, config: DatasetConfig, words: Words, seed: int) -> list[Request]:
    if name == "generated-shared-prefix":
        return shared_prefix_requests(
            groups=config.gsp_num_groups, per_group=config.gsp_prompts_per_group, system_len=config.gsp_system_prompt_len,
            question_len=config.gsp_question_len, output_len=config.gsp_output_len, vocab_size=words.vocab_size, seed=seed,
            shuffle=not config.disable_shuffle,
        )  # fmt: skip
    if name == "prefix_repetition":
        groups = config.prefix_repetition_num_prefixes
        each = -(-(COUNT if config.num_prompts is None else config.num_prompts) // max(1, groups))
        return shared_prefix_requests(
            groups=groups, per_group=each, system_len=config.prefix_repetition_prefix_len, vocab_size=words.vocab_size, seed=seed,
            question_len=config.prefix_repetition_suffix_len, output_len=config.prefix_repetition_output_len,
            shuffle=not config.disable_shuffle,
        )[: config.num_prompts]  # fmt: skip
    if name == "multi-turn":
        return multi_turn_requests(
            talks=config.multi_turn_num_conversations, turns=config.multi_turn_num_turns, context_len=config.multi_turn_context_len,
            turn_len=config.multi_turn_turn_len, output_len=config.multi_turn_output_len, range_ratio=config.random_range_ratio,
            vocab_size=words.vocab_size, seed=seed,
        )  # fmt: skip
    return trace_requests(
        config.dataset_path or "", count=config.num_prompts, block=config.timed_trace_chunk_hash_size, vocab_size=words.vocab_size,
        seed=seed, seconds_per_unit=config.timed_trace_sec_multiplier * config.mooncake_slowdown_factor, start=config.timed_trace_start,
    )  # fmt: skip


def _plain(words: Words) -> Callable[[PromptItem], list[int]]:
    def ids(item: PromptItem) -> list[int]:
        if item.messages is not None:
            raise ValueError("prompts of a file are text or token ids here; conversations are not taken")
        return list(item.token_ids) if item.token_ids is not None else words.encode(item.text or "")

    return ids


def file_requests(path: str, *, count: int, output_len: int, encode: Callable[[PromptItem], list[int]]) -> list[Request]:
    """The first ``count`` prompts of a file (all, if it has fewer), each with ``output_len`` tokens to generate.

    Raises:
        ValueError: see ``read_prompts``; or an output length below 1.
    """
    check_least("output-len", output_len, 1)
    return [Request(token_ids=encode(item), text=item.text, output_len=output_len) for item in read_prompts(path)[:count]]


def with_text(requests: Sequence[Request], words: Words) -> list[Request]:
    """The requests with their prompts, and what follows them in a conversation, as text, where they have none."""
    decode = words.decode
    assert decode is not None
    found = [r if r.text is not None else as_text(r, words.encode, decode) for r in requests]
    return [r if not r.then else replace(r, then=tuple(replace(t, text=decode(t.token_ids)) for t in r.then)) for r in found]
