"""What an engine refuses before it runs."""

from collections.abc import Collection, Sequence

import numpy as np

from megajax.core.errors import UserError
from megajax.serving.params import ENDS, SamplingParams


def check_tokens(prompt: Sequence[int], vocab: int, name: str = "prompt_tokens") -> list[int]:
    """Returns the ids as Python integers. JAX would clip what no embedding has a row for, without
    a word.

    Raises: UserError for what is empty or no list of ids of the vocabulary.
    """
    try:
        row = np.asarray(prompt)
    except ValueError as error:  # lists of several lengths
        raise UserError(f"{name} must be a list of token ids: {error}") from None
    if row.size == 0:
        raise UserError(f"{name} must have at least one token")
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise UserError(f"{name} must be a list of token ids, whole numbers")
    if row.min() < 0 or row.max() >= vocab:
        wrong = row[(row < 0) | (row >= vocab)][0]
        raise UserError(f"{name} has the token id {wrong}; the vocabulary has 0 to {vocab - 1}")
    return row.tolist()


def check_ends(params: SamplingParams, ends: Collection[int]) -> None:
    """Refuses a least length with too many end tokens. ends: of a tokenizer. Raises: UserError."""
    count = len({*params.stop_token_ids, *(() if params.ignore_eos else ends)})
    if params.min_tokens and count > ENDS:
        raise UserError(
            f"min_tokens={params.min_tokens} needs at most {ENDS} tokens that end an answer; these "
            f"are {count} (stop_token_ids)"
        )


def check_bias(params: SamplingParams, vocab: int) -> None:
    """Refuses biases and stop tokens outside the vocabulary. Raises: UserError."""
    for name in ("logit_bias", "stop_token_ids"):
        for token in getattr(params, name):
            if token >= vocab:
                raise UserError(
                    f"{name} has the token id {token}; the vocabulary has 0 to {vocab - 1}"
                )


def check_options(numerics: str, page_size: int, **counts: int | None) -> None:
    """Refuses options of an engine. counts: at least 1, or None. Raises: UserError."""
    if numerics not in ("fast", "exact"):
        raise UserError(f"numerics={numerics!r} must be 'fast' or 'exact'")
    if not (1 <= page_size <= 128) or page_size & (page_size - 1):
        near = min(128, 1 << max(0, int(page_size) - 1).bit_length())
        raise UserError(
            f"page_size={page_size} must be a power of two from 1 to 128; nearest: {near}"
        )
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1; nearest: 1")


def check_room(prompt: int, new: int, n: int, *, context: int, pages: int, page_size: int) -> None:
    """Refuses what can never run. prompt, new: its tokens, and those to draw. n: its answers.
    context: tokens of a sequence. pages: that one sequence can have. Raises: UserError."""
    for name, value in (("tokens in the prompt", prompt), ("max_tokens", new)):
        if value < 1:
            raise UserError(f"{value} {name}: there must be at least 1; nearest: 1")
    if n < 1:
        raise UserError(f"n={n} must be at least 1; nearest: 1")
    # The last token that is drawn is never fed, so it needs no room in a page.
    room = pages * page_size
    for most, what in (
        (context, f"the context has {context}"),
        (room + 1, f"the {pages} pages hold {room} of {room + 1}"),
    ):
        if prompt + new <= most:
            continue
        near = f"max_tokens={most - prompt}"
        if prompt >= most:
            near = f"a prompt of {most - 1} tokens with max_tokens=1"
        raise UserError(
            f"a prompt of {prompt} tokens and max_tokens={new} are {prompt + new} tokens; {what}; "
            f"nearest: {near}"
        )
