"""Text to token ids and back, on the ``tokenizers`` library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...parallel.json_text import parse_json

if TYPE_CHECKING:
    import tokenizers

#: characters, or tokens, from which on tokenising takes long enough to hold up other threads
LONG = 4096


class Tokenizer:
    """The tokenizer of one model folder: ``tokenizer.json`` with the special-token rules of ``tokenizer_config.json``."""

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """``config`` is ``tokenizer_config.json`` as a dict, empty when the folder has none."""
        self._backend = backend
        self.config = config
        self.bos_token, self.eos_token, self.pad_token = (_text_of(config.get(f"{kind}_token")) for kind in ("bos", "eos", "pad"))
        self.bos_id, self.eos_id, self.pad_id = (self._id_of(t) for t in (self.bos_token, self.eos_token, self.pad_token))
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._byte_level = _is_byte_level(json.loads(backend.to_str()).get("decoder"))
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of ``folder``.

        Raises:
            ValueError: ``tokenizer.json`` is missing or unreadable, or ``tokenizer_config.json`` is no JSON object.
        """
        import tokenizers

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"no tokenizer: {path} does not exist; name a folder that has one with --tokenizer, "
                "or work on token ids only with --skip-tokenizer-init"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            fix = "fetch it again or name another with --tokenizer"
            raise ValueError(f"{path} is not a readable tokenizer file: {error}; {fix}") from error
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, read_json_object(Path(folder) / "tokenizer_config.json"))

    def _id_of(self, token: str | None) -> int | None:
        """The id of a token's text, None when there is none."""
        return None if token is None else self._backend.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        With ``add_special_tokens`` the begin and end tokens are added as ``add_bos_token`` and ``add_eos_token`` of the
        configuration say; where it does not say, as the post-processor of ``tokenizer.json`` does. Text that comes out of a
        chat template has its own and is encoded without.

        Raises:
            ValueError: ``text`` is no string, or has half of a surrogate pair, which is no character.
        """
        if not isinstance(text, str):
            raise ValueError(f"text to encode must be a string, found {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X} at place {error.start}"
            raise ValueError(f"text to encode has the lone surrogate {found}, which is no character; remove or replace it") from None
        rules = "add_bos_token" in self.config or "add_eos_token" in self.config
        special = add_special_tokens and not rules
        if len(text) < LONG:
            ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        else:  # as a batch the library lets other threads run meanwhile, and takes less time
            ids = self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        if add_special_tokens and rules:
            if self.config.get("add_bos_token") and self.bos_id is not None:
                ids = [self.bos_id, *ids]
            if self.config.get("add_eos_token") and self.eos_id is not None:
                ids = [*ids, self.eos_id]
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids without a token give nothing."""
        if len(ids) < LONG:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        return str(self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])

    def id_to_token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary, None for ids without a token."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, None when there is none."""
        return self._id_of(token)

    def is_special(self, token_id: int) -> bool:
        """True for tokens that ``skip_special_tokens`` leaves out."""
        return token_id in self.special_ids

    @property
    def is_byte_level(self) -> bool:
        """True when text is the plain concatenation of the tokens' bytes, so that ``token_bytes`` is meaningful."""
        return self._byte_level

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token of a byte-level vocabulary stands for; empty for ids without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = _spelling_to_bytes(self.id_to_token(token_id) or "")
        return found


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, empty when the file does not exist; ValueError when it is something else."""
    if not path.is_file():
        return {}
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(values).__name__}")
    return values


def _text_of(token: Any) -> str | None:
    """A token of the configuration: a string, or an object with its ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """True when the decoder of ``tokenizer.json`` is ByteLevel, alone or as the only member of a sequence."""
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        members = decoder.get("decoders", [])
        return len(members) == 1 and _is_byte_level(members[0])
    return decoder.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    return alphabet | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def _spelling_to_bytes(spelling: str) -> bytes:
    """Bytes of a vocabulary entry; one with a character outside the alphabet (an added token) is plain text."""
    try:
        return bytes(_BYTES[c] for c in spelling)
    except KeyError:
        return spelling.encode("utf-8")
