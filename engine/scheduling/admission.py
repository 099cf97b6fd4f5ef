"""Which requests may run at all, and when one of them is given a seat."""

from __future__ import annotations

from collections.abc import Iterable

from ..offload.stay import Stay
from ..offload.tier_limits import RIPE_AFTER
from ..plan import I32
from ..request import Request
from .pool import Pool, known_tokens
from .prefix_node import PrefixNode
from .scheduler_config import SchedulerConfig
from .seat import Seat


def length_limit(request: Request, config: SchedulerConfig) -> int:
    """Length at which a request ends, tokens of prompt and output."""
    return min(len(request.prompt_ids) + request.params.max_tokens, config.max_model_len)


def validate(request: Request, config: SchedulerConfig) -> None:
    """Refuse what can never run.

    Raises:
        ValueError: an empty prompt, one without room for a token below ``max_model_len``, or one whose longest result
            does not fit the pool; with the numbers.
    """
    name, prompt = f"request {request.request_id}", len(request.prompt_ids)
    if prompt == 0:
        raise ValueError(f"{name}: the prompt is empty; give at least one token")
    if prompt > config.max_model_len - 1:
        raise ValueError(
            f"{name}: the prompt has {prompt} tokens, but max_model_len {config.max_model_len} leaves room for "
            f"{config.max_model_len - 1} and one token of output; shorten the prompt or raise max_model_len"
        )
    limit = length_limit(request, config)
    need = -(-limit // config.page_size)
    if need > config.n_pages:
        raise ValueError(
            f"{name}: {prompt} prompt tokens and {limit - prompt} of output need {need} pages of {config.page_size} tokens, but the "
            f"KV pool has {config.n_pages}; lower max_tokens, shorten the prompt, or enlarge the pool (max_total_tokens)"
        )


class Admission:
    """Decides whether the first waiting request fits, and gives it a seat with its first pages.

    It must fit whole, beside the prompts and the next tokens of everybody who runs. Otherwise a request that was
    preempted would come back into the last free pages, only to be preempted again.
    """

    def __init__(self, config: SchedulerConfig, pool: Pool) -> None:
        self._config = config
        self._pool = pool
        self._eos = frozenset(config.eos_token_ids)
        self._horizon = max(config.admission_horizon, config.page_size) if config.admission_horizon else 0
        # Tokens of the request at the head of the queue: it may be asked for at every step until it fits.
        self._memo: tuple[Request | None, int, I32 | None] = (None, 0, None)

    def admit(self, request: Request, budget: int, running: Iterable[Seat], step: int) -> Seat | None:
        """A seat from step ``step`` on with pages for at least one of the next ``budget`` tokens, or None when the request must wait."""
        pool = self._pool
        tokens = self._tokens(request)
        # Pages to be had beside what runs, and those it needs with its next token.
        reserve = self._reserve(running)
        need = pool.count_pages(len(tokens) + 1)
        if need > pool.pages.n_free + pool.cache.n_pages - reserve:
            return None  # not even with all of the prefix tree
        pages, node = self._match(request, tokens)
        cached, stay = len(pages) * pool.page_size, None
        if need - len(pages) <= pool.available - reserve and self._has_host(request, need - len(pages) + reserve):
            count = min(len(tokens) - cached, budget)
            if pool.tier is not None:
                rank = (request.priority, request.index)
                stay = pool.tier.enter(slot=pool.slots.first, rank=rank, pages=pages, cached=cached, total=len(tokens), count=count)
            if stay is not None or pool.tier is None:
                pages += pool.grab(pool.count_pages(cached + count) - len(pages), stay)
        if len(pages) * pool.page_size == cached:
            if pool.share is not None and pool.lacks_host:
                pool.share.shortage.lack(request.request_id, need - len(pages))
            if pool.tier is not None and stay is not None:
                pool.tier.leave(stay)
            pool.unmatch(pages, node)
            return None
        self._memo = (None, 0, None)
        return self._seat(request, tokens, pages, node, cached, step, stay)

    def usable(self, request: Request) -> int:
        """How many of its tokens may come from the prefix tree.

        The last token is always computed: its logits are needed, as all of the prompt's are when the request asks for their
        log-probabilities.
        """
        return 0 if request.params.prompt_logprobs is not None else request.known_len - 1

    def prepared(self, request: Request, step: int, *, alone: bool) -> bool:
        """Whether the prefix tree has what others may have computed of ``request``, or it does not wait for that any longer.

        ``alone``: nothing else runs.
        """
        share, cache = self._pool.share, self._pool.cache
        if share is None:
            return True
        if share.yields:  # pages are short, and others have waited longer
            if alone:  # or nobody would know that this one waits as well
                share.shortage.lack(request.request_id, self._pool.count_pages(request.known_len + 1))
            return False
        tokens = self._tokens(request)[: self.usable(request)]
        if cache.covers(tokens):
            return True
        found = share.questions.look_up(request, len(tokens)) if step >= RIPE_AFTER else None
        if found is None:
            return False
        if found[1]:
            self._pool.bring(*found)
        return True

    def _has_host(self, request: Request, count: int) -> bool:
        """Whether others leave ``count`` host pages."""
        pool = self._pool
        if pool.share is None or pool.has_host(count):
            return True
        pool.share.shortage.lack(request.request_id, count)
        return False

    def _match(self, request: Request, tokens: I32) -> tuple[list[int], PrefixNode | None]:
        """Held pages from the prefix tree."""
        return self._pool.match(tokens[: self.usable(request)]) if self._pool.caching else ([], None)

    def _seat(
        self, request: Request, tokens: I32, pages: list[int], node: PrefixNode | None, cached: int, step: int, stay: Stay | None
    ) -> Seat:
        params = request.params
        seat = Seat(
            request=request,
            rank=(request.priority, request.index),
            slot=self._pool.slots.take(step),
            pages=pages,
            node=node,
            tokens=tokens,
            limit=length_limit(request, self._config),
            total=len(tokens),
            computed=cached,
            eos_ids=frozenset() if params.ignore_eos else self._eos,
            stop_ids=frozenset(params.stop_ids),
            stay=stay,
            guided=request.grammar is not None,
        )
        request.slot, request.pages, request.cached, request.computed = seat.slot, seat.pages, cached, cached
        return seat

    def _tokens(self, request: Request) -> I32:
        known, length, tokens = self._memo
        if known is not request or length != request.known_len or tokens is None:
            tokens = known_tokens(request)
            self._memo = (request, len(tokens), tokens)
        return tokens

    def _reserve(self, running: Iterable[Seat]) -> int:
        """Pages that those who run will ask for soon: for the rest of their prompts and their next tokens."""
        size, horizon = self._pool.page_size, self._horizon
        return sum(max(0, -(-min(seat.total + horizon, seat.limit) // size) - len(seat.pages)) for seat in running)
