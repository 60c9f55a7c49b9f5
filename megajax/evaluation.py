"""Evaluation of language models: perplexity, multiple choice, exact match, lm-evaluation-harness.

All functions ask a `serving.Engine` with a tokenizer, which must have no other request meanwhile.
Log-probabilities are those of the unmodified logits, in natural units (nats), computed in float32
and added in float64. The definitions are those of lm-evaluation-harness (EleutherAI, lm_eval/api):
a choice's score is the sum of the log-probabilities of its tokens after the prompt, and a standard
error is the sample deviation over sqrt(n). docs/evaluation.md compares the numbers.
Not here: the held-out loss of a training run (training/evaluate.py), scores with the trainer's
forward pass (training/scores.py).
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.data.tokenizer import Tokenizer, prompt_ids
from megajax.serving import Engine, SamplingParams

AHEAD = 256  # (chosen) requests that an engine has at a time, so that memory is bounded
LINE = 2**22  # (chosen) bytes of a line of a task file
ROWS = 2**20  # (chosen) rows of a task file
CHOICES = 256  # (chosen) choices of a row
SEPARATOR = "\n\n"  # (lm-evaluation-harness, fewshot_delimiter) between the examples of a prompt

type Row = Mapping[str, Any]
type Norm = Literal["none", "characters", "bytes"]


class Perplexity(NamedTuple):
    """How well a model predicts text. The perplexity itself is exp(nats_per_token)."""

    nats_per_token: float
    bits_per_byte: float


class Estimate(NamedTuple):
    """A mean over rows with its standard error, which is NaN for one row."""

    value: float
    error: float


class Score(NamedTuple):
    """What a model says of one text. nats: minus the sum of the log-probabilities of its predicted
    tokens. tokens: how many there are. bytes: of the text that they stand for, in UTF-8."""

    nats: float
    tokens: int
    bytes: int


# ---- requests


def run_all(
    engine: Engine, prompts: Iterable[Sequence[int]], params: SamplingParams, name: str = "rows"
) -> Iterator[tuple[int, list[int], list[dict[int, float] | None]]]:
    """Yields (number of a prompt, tokens of an answer, log-probabilities of the prompt's tokens if
    params ask for them) for each answer, in the order in which they end.

    At most AHEAD requests wait at a time. If the caller stops early, the others are cancelled.
    name: what the prompts are called in messages. Raises: UserError for a prompt that cannot run,
      an engine that has other requests, and logits that are no numbers.
    """
    if engine.busy:
        raise UserError("the engine has requests that have not ended; run them to their end first")
    numbered, numbers, grown = enumerate(prompts), {}, {}  # type: ignore[var-annotated]
    left = dict[int, int]()  # answers of a request that have not ended
    try:
        while True:
            while len(left) < AHEAD and (following := next(numbered, None)) is not None:
                try:
                    request = engine.submit(following[1], params)
                except UserError as error:
                    raise UserError(f"{name}[{following[0]}]: {error}") from None
                numbers[request], left[request] = following[0], params.n
            if not left:
                return
            for output in engine.step():
                request = output.request_id
                tokens, scores = grown.setdefault((request, output.index), ([], []))
                tokens += output.tokens
                scores += output.prompt_logprobs or []
                if output.finish_reason is None:
                    continue
                if output.finish_reason not in ("stop", "length"):
                    raise UserError(
                        f"{name}[{numbers[request]}]: the answer ended with "
                        f"{output.finish_reason!r}; the model's logits may not be finite"
                    )
                yield numbers[request], *grown.pop((request, output.index))
                left[request] -= 1
                if not left[request]:
                    del left[request], numbers[request]
    finally:
        for request in left:
            engine.cancel(request)
        while left and engine.busy:
            engine.step()


def tokenizer_of(engine: Engine) -> Any:
    """Returns the engine's tokenizer. Raises: UserError if it has none."""
    if engine.tokenizer is None:
        raise UserError("evaluation needs an engine with a tokenizer (Engine(tokenizer=...))")
    return engine.tokenizer


def token_logprobs(
    engine: Engine,
    rows: Sequence[Sequence[int]],
    *,
    window: int | None = None,
    stride: int | None = None,
    name: str = "rows",
) -> list[np.ndarray]:
    """Returns the log-probability of each token of each row but the first, after those before it.

    A row of more than `window` tokens is read in windows that begin every `stride` tokens; each
    gives the scores of the tokens that the window before did not have. So a token has from
    window - stride to window - 1 tokens before it, unless it is nearer to the beginning.

    Args: rows: token ids. window: None: the most that the engine reads, its context less one.
      stride: from 1 to window - 1; None: half a window. name: of the rows in messages.
    Returns: one float32 array a row, one shorter than the row.
    Raises: UserError for ids that the vocabulary lacks, empty rows, and sizes that cannot be.
    """
    most = engine.context - 1  # the engine draws a token after what it reads
    window = most if window is None else window
    if not 2 <= window <= most:
        near = min(max(window, 2), most)
        raise UserError(
            f"window={window} must be from 2 to {most}, the engine's context less one; nearest: "
            f"{near} (--window)"
        )
    stride = window // 2 if stride is None else stride
    if not 1 <= stride < window:
        raise UserError(
            f"stride={stride} must be from 1 to {window - 1}, below window; nearest: "
            f"{min(max(stride, 1), window - 1)} (--stride)"
        )
    arrays = [np.full(max(len(row) - 1, 0), np.nan, np.float32) for row in rows]
    pieces = []  # (row, first token of the window, last token but one)
    for i, row in enumerate(rows):
        if not len(row):
            raise UserError(f"{name}[{i}] must have at least one token")
        starts = [0]
        while starts[-1] + window < len(row):
            starts.append(starts[-1] + stride)
        pieces += [(i, s, min(s + window, len(row))) for s in starts if len(row) > 1]
    ids = (rows[i][start:stop] for i, start, stop in pieces)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
    for number, _, scores in run_all(engine, ids, params, name):
        i, start, stop = pieces[number]
        new = start + window - stride if start else 1  # the first token that has no score yet
        for place in range(new, stop):
            scored = scores[place - start]
            assert scored is not None
            arrays[i][place - 1] = scored[int(rows[i][place])]
    return arrays


# ---- perplexity


def score_texts(
    engine: Engine,
    texts: Sequence[str | Sequence[int]],
    *,
    window: int | None = None,
    stride: int | None = None,
    special: bool = False,
) -> list[Score]:
    """Returns what the model says of each text. Args and errors: as of `perplexity`."""
    tokenizer = tokenizer_of(engine)
    if isinstance(texts, str):
        raise UserError("texts must be a list of texts, not one text; nearest: [texts]")
    rows = []
    for i, text in enumerate(texts):
        if isinstance(text, str) and not is_text(text):
            raise UserError(f"texts[{i}] cannot be written in UTF-8: it has half a surrogate pair")
        is_ids = not isinstance(text, str)
        rows.append([int(i) for i in text] if is_ids else prompt_ids(tokenizer, text, special))
        if not rows[-1]:
            raise UserError(f"texts[{i}] is empty, and the tokenizer begins no text by itself")
    scores = token_logprobs(engine, rows, window=window, stride=stride, name="texts")
    begins, size_of = bool(tokenizer.prefix()), _sizes(tokenizer)
    sizes = [
        len(text.encode()) - (0 if begins else size_of(row[:1]))
        if isinstance(text, str)
        else size_of(row[1:])
        for text, row in zip(texts, rows, strict=True)
    ]
    return [
        Score(-float(each.sum(dtype=np.float64)), len(each), size)
        for each, size in zip(scores, sizes, strict=True)
    ]


def perplexity(
    engine: Engine,
    texts: Sequence[str | Sequence[int]],
    *,
    window: int | None = None,
    stride: int | None = None,
    special: bool = False,
) -> Perplexity:
    """Returns (nats a token, bits a byte) over all texts together.

    nats = -sum of log p(token | tokens before it), over the predicted tokens of all texts;
    nats a token = nats / their number; bits a byte = nats / ln 2 / UTF-8 bytes that they stand for.

    A text begins with the tokenizer's begin token (BOS) if the tokenizer writes one. Then every
    token of the text is predicted. Otherwise the first one is not, and neither the token nor its
    bytes count, as in transformers' loss of `model(ids, labels=ids)`. No end token is counted. A
    long text is read in windows (`token_logprobs`), each token is counted once.

    Args: texts: or lists of token ids, which are read as they are. window, stride: in tokens, as of
      `token_logprobs`. special: whether the text of a special token is that token.
    Raises: UserError for texts without a predicted token, and as `token_logprobs`.
    """
    scores = score_texts(engine, texts, window=window, stride=stride, special=special)
    return summed(scores)


def summed(scores: Sequence[Score]) -> Perplexity:
    """Returns the perplexity over several texts. Raises: UserError if no token is predicted."""
    nats = math.fsum(score.nats for score in scores)
    tokens, size = (sum(score[k] for score in scores) for k in (1, 2))
    if not tokens:
        raise UserError("texts have no predicted token: give a text of at least two tokens")
    return Perplexity(nats / tokens, nats / math.log(2) / size if size else math.nan)


def ratio_error(scores: Sequence[Score]) -> Estimate:
    """Returns the nats a token of several texts, with the standard error of a ratio of two means:
    texts are a sample of independent ones, tokens of a text are not."""
    value, n = summed(scores).nats_per_token, len(scores)
    if n < 2:
        return Estimate(value, math.nan)
    squares = math.fsum((s.nats - value * s.tokens) ** 2 for s in scores)
    return Estimate(value, math.sqrt(squares * n / (n - 1)) / sum(s.tokens for s in scores))


def _sizes(tokenizer: Tokenizer) -> Callable[[Sequence[int]], int]:
    """Returns a function that returns the bytes that ids stand for in a text."""
    try:
        pieces = tokenizer.pieces()
    except UserError:  # ids that stand for no bytes
        return lambda ids: len(tokenizer.decode(ids).encode())
    return lambda ids: sum(len(pieces[i] or b"") for i in ids if i < len(pieces))


# ---- multiple choice


def encode_pair(tokenizer: Tokenizer, prompt: str, choice: str) -> tuple[list[int], int]:
    """Returns (ids of a prompt and a choice together, how many of them are the prompt's).

    As `_encode_pair` of lm-evaluation-harness: spaces at the end of the prompt are the choice's,
    both are encoded as one text, and the choice's tokens are those beyond as many as the prompt
    alone has. An empty prompt is the token that begins a text, or else the one that ends it.
    """
    stripped = prompt.rstrip()
    prompt, choice = stripped, prompt[len(stripped) :] + choice
    if not prompt:
        begin = tokenizer.prefix() or [i for i in (tokenizer.end,) if i is not None]
        return [*begin, *prompt_ids(tokenizer, choice, begin=False)], len(begin)
    both = prompt_ids(tokenizer, prompt + choice)
    return both, len(prompt_ids(tokenizer, prompt))


def loglikelihoods(
    engine: Engine, pairs: Sequence[tuple[Sequence[int], int]], name: str = "rows"
) -> list[tuple[float, bool]]:
    """Returns (sum of the log-probabilities of a row's tokens from place `first` on, whether each
    of them is the likeliest in its place) for each pair of a row and `first`.

    A row that is longer than the engine's context less one loses its beginning.
    Raises: UserError for a row without such tokens, or with more of them than the engine reads.
    """
    most, prompts, firsts = engine.context - 1, [], []
    for i, (row, first) in enumerate(pairs):
        cut = max(0, len(row) - most)
        if not cut < first < len(row):
            raise UserError(
                f"{name}[{i}] has {len(row)} tokens, of which those from number {first} on are "
                f"scored: there must be one, and one before it within the {most} tokens that the "
                "engine reads (--context)"
            )
        prompts.append(row[cut:])
        firsts.append(first - cut)
    sums: list[tuple[float, bool]] = [(math.nan, False)] * len(prompts)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, ignore_eos=True)
    for i, _, scores in run_all(engine, iter(prompts), params, name):
        total, greedy = [], True
        for token, scored in zip(prompts[i][firsts[i] :], scores[firsts[i] :], strict=True):
            assert scored is not None
            total.append(scored[int(token)])
            greedy &= next(iter(scored)) == int(token)  # the likeliest comes first
        sums[i] = math.fsum(total), greedy
    return sums


def choice_scores(engine: Engine, rows: Sequence[Row]) -> list[np.ndarray]:
    """Returns for each row the sum of the log-probabilities of each choice's tokens, float64.

    Args and errors: as of `choices`.
    """
    tokenizer = tokenizer_of(engine)
    for i, row in enumerate(rows):
        check_row(row, f"rows[{i}]", "choices")
    pairs, most = [], engine.context - 1
    for i, row in enumerate(rows):
        for k, text in enumerate(row["choices"]):
            ids, first = encode_pair(tokenizer, row["prompt"], text)
            if not first < len(ids) <= first + most - 1:
                raise UserError(
                    f"rows[{i}]: choices[{k}] has {len(ids) - first} tokens beyond the prompt's; "
                    f"there must be from 1 to {most - 1}, the engine's context less two (--context)"
                )
            pairs.append((ids, first))
    sums = iter(loglikelihoods(engine, pairs))
    return [np.array([next(sums)[0] for _ in row["choices"]]) for row in rows]


def choose(row: Row, scores: np.ndarray, norm: Norm = "none") -> int:
    """Returns the index of the choice with the best score. Args: as of `choices`."""
    if norm not in ("none", "characters", "bytes"):
        raise UserError(f"norm={norm!r} must be 'none', 'characters' or 'bytes'")
    if norm != "none":
        texts = [text if norm == "characters" else text.encode() for text in row["choices"]]
        scores = scores / np.array([len(text) for text in texts])
    return int(np.argmax(scores))


def choices(engine: Engine, rows: Sequence[Row], *, norm: Norm = "none") -> Estimate:
    """Returns (accuracy, standard error) of multiple choice: sqrt(p (1 - p) / (n - 1)).

    The model chooses the choice whose tokens have the largest sum of log-probabilities after the
    prompt. Prompt and choice follow one another as they are: a space between them has to be in one
    of them.

    Args: rows: each {'prompt': a text, 'choices': two texts or more, 'answer': the index of the
      right one}. norm: 'none': lm-evaluation-harness's `acc`; 'characters': the sum over the
      choice's length, its `acc_norm`; 'bytes': over its bytes in UTF-8.
    Raises: UserError with the number of a row that is wrong.
    """
    pairs = zip(rows, choice_scores(engine, rows), strict=True)
    return mean([choose(row, scores, norm) == row["answer"] for row, scores in pairs])


def mean(values: Sequence[float]) -> Estimate:
    """Returns the mean and its standard error. Raises: UserError without values."""
    n = len(values)
    if not n:
        raise UserError("rows is empty: there must be at least one row")
    value = math.fsum(values) / n
    if n < 2:
        return Estimate(value, math.nan)
    squares = math.fsum((x - value) ** 2 for x in values)
    return Estimate(value, math.sqrt(squares / (n - 1) / n))


# ---- exact match


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str = "prompts"
) -> list[list[str]]:
    """Returns the texts of the answers to each prompt, without the end token or a stop string."""
    tokenizer = tokenizer_of(engine)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else tokenizer.ends)}
    texts: list[list[str]] = [[] for _ in prompts]
    for i, tokens, _ in run_all(engine, iter(prompts), params, name):
        if tokens and tokens[-1] in ends:
            tokens.pop()
        text = tokenizer.decode(tokens)
        before = len(tokenizer.decode(tokens[: params.min_tokens])) if params.min_tokens else 0
        cuts = [at for stop in params.stop if (at := text.find(stop, before)) >= 0]
        texts[i].append(text[: min(cuts, default=len(text))])
    return texts


def matched(
    engine: Engine, rows: Sequence[Row], *, max_tokens: int = 32, stop: Sequence[str] = ("\n",)
) -> list[bool]:
    """Returns for each row whether its greedy answer is the target. Args and errors: as of
    `matches`."""
    tokenizer = tokenizer_of(engine)
    for i, row in enumerate(rows):
        check_row(row, f"rows[{i}]", "target")
    params = SamplingParams(max_tokens=max_tokens, temperature=0, stop=stop)
    prompts = [prompt_ids(tokenizer, row["prompt"]) for row in rows]
    texts = generate(engine, prompts, params, "rows")
    pairs = zip(texts, rows, strict=True)
    return [text.strip() == row["target"].strip() for (text,), row in pairs]


def matches(
    engine: Engine, rows: Sequence[Row], *, max_tokens: int = 32, stop: Sequence[str] = ("\n",)
) -> Estimate:
    """Returns (share of rows whose greedy answer is the target, standard error).

    Both are compared without the white space around them. Args: rows: each {'prompt': a text,
      'target': a text}. max_tokens, stop: where an answer ends. Raises: UserError with the number
      of a row that is wrong.
    """
    return mean(matched(engine, rows, max_tokens=max_tokens, stop=stop))


# ---- tasks


def is_text(value: Any) -> bool:
    """Tells text that UTF-8 can write from other values: JSON may hold half a surrogate pair."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def check_row(row: Any, name: str, kind: str = "") -> str:
    """Returns the kind of a row: 'choices', 'target' or 'label'. kind: which it must be; "": any.

    Raises: UserError that begins with its name for what is no row.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{name} must be an object with the members prompt and {kind or 'choices'}")
    if kind == "label" or (not kind and "prompt" not in row and "label" in row):
        for member in ("text", "label"):
            if not is_text(row.get(member)) or not row[member]:
                raise UserError(
                    f"{name}: {member}={row.get(member)!r:.80} must be a text, not empty"
                )
        return "label"
    if not is_text(row.get("prompt")):
        raise UserError(f"{name}: prompt={row.get('prompt')!r:.80} must be a text")
    has = [member for member in ("choices", "target") if row.get(member) is not None]
    if len(has) != 1 or kind not in ("", has[0]):
        needed = kind or "choices (with answer) or target"
        raise UserError(f"{name} must have {needed}; it has {', '.join(map(str, row)):.200}")
    if has == ["target"]:
        if not is_text(row["target"]) or not row["target"].strip():
            raise UserError(f"{name}: target={row['target']!r:.80} must be a text, not empty")
        return "target"
    listed, answer = row["choices"], row.get("answer")
    if not isinstance(listed, list | tuple) or not 2 <= len(listed) <= CHOICES:
        raise UserError(f"{name}: choices must be a list of 2 to {CHOICES} texts")
    for number, text in enumerate(listed):
        if not is_text(text) or not text:
            raise UserError(f"{name}: choices[{number}]={text!r:.80} must be a text, not empty")
    legal = isinstance(answer, int | np.integer) and not isinstance(answer, bool)
    if not legal or not 0 <= answer < len(listed):
        near = f"; nearest: {min(max(answer, 0), len(listed) - 1)}" if legal else ""
        raise UserError(
            f"{name}: answer={answer!r:.80} must be the index of a choice, from 0 to "
            f"{len(listed) - 1}{near}"
        )
    return "choices"


def read_task(path: str | Path, flag: str = "tasks") -> tuple[str, list[dict[str, Any]]]:
    """Returns (the kind of its rows: 'choices', 'target' or 'label', the rows) of a file with a
    JSON object a line; empty lines are left out.

    flag: which named the file. Raises: UserError with the number of a line that is wrong.
    """
    file, kind, rows = files.expand(path, flag), "", []
    try:
        with files.open_regular(file) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE + 1), b""), 1):
                name = f"{file}, line {number}"
                if len(line) > LINE:
                    raise UserError(f"{name} has more than {LINE:,} bytes (--{flag})")
                if not line.strip():
                    continue
                if len(rows) >= ROWS:
                    raise UserError(f"{file} has more than {ROWS:,} rows (--{flag})")
                try:
                    row = files.parse_json(line, files.each_once)
                except ValueError as error:
                    raise UserError(f"{name} is not JSON: {str(error)[:300]} (--{flag})") from None
                kind = check_row(row, name, kind)
                rows.append(row)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror} (--{flag})") from None
    if not rows:
        raise UserError(f"{file} has no rows (--{flag})")
    return kind, rows


def few_shot(rows: Sequence[Row], count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns the rows with `count` examples before each prompt: other rows with their answers,
    drawn by the seed and the row's number, never the row itself.

    Raises: UserError if there are not so many other rows.
    """
    if not 0 <= count < max(len(rows), 1):
        raise UserError(
            f"few_shot={count} must be from 0 to {len(rows) - 1}, the number of other rows; "
            f"nearest: {min(max(count, 0), len(rows) - 1)} (--few_shot)"
        )
    made = []
    for i, row in enumerate(rows):
        drawn = random.Random(json.dumps([seed, i])).sample(range(len(rows) - 1), count)
        examples = [rows[k + (k >= i)] for k in drawn]
        shown = [e["prompt"] + _right(e) + SEPARATOR for e in examples]
        made.append({**row, "prompt": "".join(shown) + row["prompt"]})
    return made


def _right(row: Row) -> str:
    return row["target"] if "target" in row else row["choices"][row["answer"]]


# ---- lm-evaluation-harness


def lm_eval_model(engine: Engine, *, max_tokens: int = 256) -> Any:
    """Returns the engine as a model of lm-evaluation-harness: `lm_eval.simple_evaluate(model=...)`.

    max_tokens: of an answer whose request states no other number. Texts are tokenized as by the
    harness's own models: without a begin token unless the tokenizer writes one, and the text of a
    special token is that token. Raises: UserError if the package is not installed.
    """
    try:
        from lm_eval import utils  # type: ignore[missing-import]
        from lm_eval.api.model import LM  # type: ignore[missing-import]
    except ImportError as error:
        raise UserError(
            f"lm-evaluation-harness cannot be imported ({error}): uv sync --extra eval"
        ) from None
    tokenizer = tokenizer_of(engine)

    class EngineModel(LM):
        """The three kinds of requests of the harness."""

        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            pairs = [encode_pair(tokenizer, *request.args) for request in requests]
            return loglikelihoods(engine, pairs, "requests")

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            begin = [*tokenizer.prefix(), tokenizer.end][0]
            windows, owners = [], []
            for number, request in enumerate(requests):
                ids = prompt_ids(tokenizer, request.args[0], begin=False)
                for pair in utils.get_rolling_token_windows(ids, begin, engine.context - 2, 1):
                    before, after = utils.make_disjoint_window(pair)
                    windows.append(([*before, *after], len(before)))
                    owners.append(number)
            sums = [0.0] * len(requests)
            for number, scored in zip(owners, loglikelihoods(engine, windows), strict=True):
                sums[number] += scored[0]
            return sums

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            alike: dict[SamplingParams, list[int]] = {}
            for number, request in enumerate(requests):
                alike.setdefault(_params(request.args[1], max_tokens), []).append(number)
            texts = [""] * len(requests)
            for params, numbers in alike.items():
                room = engine.context - params.max_tokens
                ids = [prompt_ids(tokenizer, requests[n].args[0])[-room:] for n in numbers]
                made = generate(engine, ids, params, "requests")
                for number, (text,) in zip(numbers, made, strict=True):
                    texts[number] = text
            return texts

    return EngineModel()


def _params(said: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """Returns what the arguments of a request of the harness ask for."""
    stops, does = said.get("until") or [], said.get("do_sample")
    until = [stops] if isinstance(stops, str) else list(stops)
    return SamplingParams(
        max_tokens=int(said.get("max_gen_toks") or max_tokens),
        temperature=0.0 if does is False else float(said.get("temperature") or 0),
        top_p=float(said.get("top_p") or 1),
        stop=[stop for stop in until if stop],
    )
