"""What a chat model learns: conversations in files, as rows of tokens with the answers as targets.

  FILE.jsonl, .json     a conversation a line (also packed: .gz, .zst), or an element of the list
  FILE.parquet, .arrow  a conversation a row; also a folder that save_to_disk of datasets wrote
  quiz                  a small set that is made here (quiz.py)

A conversation is `messages` of OpenAI's API (role, content; tool_calls, tool messages, and `tools`
beside them), `conversations` of ShareGPT (from, value), or Alpaca's `instruction`, `input` and
`output`; conversations.py reads the first two for images too.

Each is tokenised once and cached. Which conversations are held out is decided by what is asked in
them, so two answers to one question lie on one side. A row holds whole conversations, as many as
fit; each is a segment, which attends to itself only. What is longer than a row is cut behind the
last answer that fits, or left out, and counted. Row i depends on (seed, i) alone.

Legend: S tokens of a row.
"""

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megajax.core import files
from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.data import quiz
from megajax.data.arrow import folder_files
from megajax.data.chat import Chat, ChatRow, conversation_rows
from megajax.data.conversations import (
    Arrow,
    Lines,
    Place,
    Several,
    Source,
    Table,
    messages_of,
)
from megajax.data.documents import is_whole, make_folder, text_key
from megajax.data.indexed import TokenFile, TokenWriter
from megajax.data.pack import IGNORED, MixedRows, mix, packed, parse, permute
from megajax.data.source import PACKED, SURROGATE, check_pyarrow, file_parts
from megajax.data.tokenizer import Tokenizer, bpe_size, train_bpe

QUIZ = "quiz"
ROLES = ("system", "user", "assistant", "tool")
MEMBERS = ("name", "tool_calls", "tool_call_id", "reasoning_content")  # of a message, as they are
COLUMNS = (
    "messages conversations system tools instruction input output history prompt chosen rejected"
).split()
FILES = (
    "quiz, FILE.jsonl (also .gz or .zst), FILE.json, FILE.parquet, FILE.arrow or a folder of "
    "save_to_disk"
)
MAX_FILE = 2**30  # (chosen) bytes of a .json file or of unpacked lines, which memory holds
OPEN_ROWS = 32  # (chosen) rows that may still take a conversation while rows are packed
FORMAT = 1  # of the cache
PAD = 0  # the id of what no conversation fills; segments say that it is dead
THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ChatDataConfig(Checked, section="data"):
    """Conversations, their tokenizer, and how they become rows."""

    source: str = option(
        QUIZ,
        "quiz: a small made set; or conversations in a .jsonl, .json, .parquet or .arrow file or a "
        "folder of save_to_disk; or a mixture a:0.7,b:0.3 of names without commas",
    )
    tokenizer: str = option(
        "bpe:512", "bpe:N (trained here, cached), a tokenizer.json, its folder, or a .gguf file"
    )
    holdout: float = option(
        0.1, "fraction of conversations held out, by hash of what is asked", at_least=0, below=1
    )
    too_long: Literal["cut", "drop", "error"] = option(
        "cut",
        "what to do with a conversation longer than a row; cut: it ends behind the last answer "
        "that fits, and is left out if none does",
    )
    faulty: Literal["error", "skip"] = option(
        "error", "what to do with a conversation that cannot be read or learnt"
    )
    prefetch: int = option(4, "batches that threads prepare ahead", "batches", at_least=0)


# ---- conversations


@dataclasses.dataclass(frozen=True)
class Conversation:
    """where: its file and place, for messages. messages: as OpenAI's API has them. tools: for the
    chat template, or None."""

    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    @property
    def asked(self) -> str:
        """What is asked in it, by which it is held out."""
        asked = [m for m in self.messages if m["role"] != "assistant"]
        return json.dumps(asked, ensure_ascii=False, sort_keys=True)


def conversation(value: Any, where: str, place: Place | None = None) -> Conversation:
    """Returns the conversation that a value of JSON, or a row of a table, describes.

    Raises: UserError that begins with `where`.
    """
    try:
        if not isinstance(value, Mapping):
            raise UserError(f"it must be an object with messages, not {value!r:.60}")
        listed = messages_of(value)
        if listed is None:
            listed = _instruction(value)
        made = Conversation(where, checked_messages(listed), tools_of(value.get("tools")))
        if not any(m["role"] == "assistant" for m in made.messages):
            raise UserError("no message is the assistant's, so there is nothing to learn")
        return made
    except UserError as error:
        raise UserError(f"{where}: {error} (--data.source)") from None


def checked_messages(listed: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns messages with the members that a chat template may read, content a text.

    Raises: UserError for what is no message, a part that is no text, and text that is no Unicode.
    """
    made = []
    for number, message in enumerate(listed):
        members = message if isinstance(message, Mapping) else {}
        role, content = members.get("role"), members.get("content")
        role = {"developer": "system"}.get(role, role) if isinstance(role, str) else None
        if role not in ROLES:
            raise UserError(
                f"message {number} must have a role of {', '.join(ROLES)}, not "
                f"{members.get('role')!r:.40}"
            )
        calls = members.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise UserError(
                f"message {number} has tool_calls that are no list of objects with a function, "
                "which has a name"
            )
        if isinstance(content, list):
            content = "\n".join(_text_part(part, number) for part in content)
        if content is None and (calls or members.get("reasoning_content")):
            content = ""
        if not isinstance(content, str):
            raise UserError(f"message {number} must have a content, a text, not {content!r:.40}")
        if members.get("weight") not in (None, 1):
            raise UserError(
                f"message {number} has the weight {members['weight']!r:.40}; all answers are "
                "learnt alike: leave it out"
            )
        more = {k: members[k] for k in MEMBERS if members.get(k) is not None}
        made.append({"role": role, "content": content, **more})
    if SURROGATE.search(json.dumps(made, ensure_ascii=False)):
        raise UserError("a lone surrogate is not text")
    return made


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _text_part(part: Any, number: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise UserError(
            f"message {number} has a part {kind!r:.40} that is no text; conversations about images "
            "are those of vision-language models"
        )
    return text


def _instruction(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of Alpaca's members. Raises: UserError where they are missing."""
    asked, more, answer = (value.get(name) for name in ("instruction", "input", "output"))
    if not isinstance(asked, str) or not isinstance(answer, str):
        members = ", ".join(f"{k!r:.40}" for k in list(value)[:8]) or "none"
        raise UserError(
            "it needs messages, conversations, or instruction and output, which are texts; its "
            f"members: {members}"
        )
    if not isinstance(more, str | None) or not isinstance(value.get("system"), str | None):
        raise UserError("input and system must be texts")
    made = [{"role": "system", "content": value["system"]}] if value.get("system") else []
    for pair in value.get("history") or []:
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            raise UserError("history must be a list of pairs: a question and its answer")
        made += [{"role": r, "content": x} for r, x in zip(ROLES[1:3], pair, strict=True)]
    text = f"{asked}\n\n{more}" if more else asked
    return [*made, {"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def tools_of(value: Any) -> list[Any] | None:
    """Returns the tools of a conversation, or None. Raises: UserError."""
    if isinstance(value, str) and value.strip():
        try:
            value = files.parse_json(value)
        except ValueError as error:
            raise UserError(f"tools is a text that is no JSON: {error}") from None
    if value in (None, "", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise UserError("tools must be a list of objects")
    return value


class Listed:
    """The elements of a .json file, which holds a list, or of a list that is made here."""

    unread: Mapping[str, int] = {}

    def __init__(self, name: str, values: Sequence[Any], read: Callable):
        """read: makes a record of an element."""
        self.name, self._values, self._read = name, values, read

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, k: int) -> Any:
        where = f"{self.name} element {k + 1}"
        return self._read(self._values[k], where, Place(None, False))


class PackedLines:
    """The lines of a .jsonl.gz or .jsonl.zst, unpacked in memory."""

    unread: Mapping[str, int] = {}

    def __init__(self, path: Path, read: Callable):
        """Raises: UserError when it cannot be unpacked, or is too large."""
        self.name, self._read, self._lines = str(path), read, []
        left = MAX_FILE
        for number, line in enumerate(file_parts(path, lines=True), 1):
            left -= len(line)
            if left < 0:
                raise UserError(
                    f"{path} unfolds to over {MAX_FILE:,} bytes, which are read at most: unfold it "
                    "(--data.source)"
                )
            if line.strip():
                self._lines.append((number, line))

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, k: int) -> Any:
        number, line = self._lines[k]
        where = f"{self.name} line {number}"
        try:
            value = files.parse_json(line.decode())
        except ValueError as error:
            raise UserError(f"{where} is not JSON: {error} (--data.source)") from None
        return self._read(value, where, Place(None, False))


def open_source(name: str, read: Callable[..., Any] = conversation) -> Source:
    """Returns the records of a file, or of the made set.

    read(value, where, place): makes a record of a value of JSON; another one reads pairs of answers
    (`chosen`, `rejected`) from the same files.
    Raises: UserError when there is no such file, it is of another kind, or it has no record.
    """
    if name == QUIZ:
        return Listed(QUIZ, [{"messages": quiz.messages(k)} for k in range(quiz.SIZE)], read)
    path = expand(name, "data.source")
    try:
        if not path.exists():
            raise UserError(f"data.source={name} must be {FILES}; it does not exist")
        suffix = "".join(path.suffixes[-2:] if path.suffix in PACKED else path.suffixes[-1:])
        suffix = suffix.lower()
        source: Any
        if path.is_dir():
            tables = [Arrow(file, read, COLUMNS) for file in folder_files(path)]
            source = Several(name, tables)
        elif suffix == ".arrow":
            source = Arrow(path, read, COLUMNS)
        elif suffix in {f".jsonl{end}" for end in PACKED}:
            check_pyarrow(path)
            source = PackedLines(path, read)
        elif suffix == ".jsonl":
            source = Lines(path, False, read)
        elif suffix == ".parquet":
            source = Table(path, False, read, COLUMNS)
        elif suffix == ".json":
            values = files.parse_json(files.read_bytes(path, MAX_FILE))
            if not isinstance(values, list):
                raise UserError(f"{path} must hold a list of conversations")
            source = Listed(str(path), values, read)
        else:
            raise UserError(f"data.source={name} must be {FILES}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror} (--data.source)") from None
    except UserError as error:
        said = str(error)
        raise UserError(said if "--data.source" in said else f"{said} (--data.source)") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error} (--data.source)") from None
    if not len(source):
        raise UserError(f"data.source={name} has no conversation (--data.source)")
    return source


def open_sources(cfg: ChatDataConfig) -> list[tuple[str, float, Source]]:
    """Returns (name, weight, records) of each part of `data.source`. Raises: UserError."""
    return [(name, weight, open_source(name)) for name, weight in parse(cfg.source)]


def trained_tokenizer(
    cfg: ChatDataConfig, sources: Sequence[tuple[str, float, Source]], cache: Path
) -> Path:
    """Returns the tokenizer.json of 'bpe:N', trained on the texts of conversations and cached."""
    size, states = bpe_size(cfg.tokenizer), [_state(name) for name, *_ in sources]
    assert size is not None
    folder = cache / "tokenizers" / f"bpe-{size}-{mix(FORMAT, *states):016x}"

    def texts() -> Iterator[str]:
        for *_, source in sources:
            for k in range(len(source)):
                try:
                    yield from (m["content"] for m in source[k].messages)  # type: ignore
                except UserError:
                    if cfg.faulty == "error":
                        raise

    if not is_whole(folder):
        make_folder(folder, lambda new: train_bpe(texts(), size, new / "tokenizer.json"))
    return folder / "tokenizer.json"


def _state(name: str) -> str:
    """Returns what changes when the file of a source does."""
    if name == QUIZ:
        return f"{QUIZ} {[quiz.messages(k) for k in (0, 1, 2)]}"
    path = expand(name, "data.source")
    listed = folder_files(path) if path.is_dir() else [path]
    stats = [file.stat() for file in listed]
    return " ".join([f"{path.resolve()}", *(f"{s.st_size} {s.st_mtime_ns}" for s in stats)])


# ---- tokenised


@dataclasses.dataclass(frozen=True)
class Chats:
    """Tokenised conversations of one side. An id in the file is twice the token, plus one if the
    token is learnt. numbers: of them in the file. sizes: places that each takes in a row."""

    file: TokenFile
    numbers: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        """Number of conversations."""
        return len(self.numbers)

    def read(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens int32, whether each is learnt) of conversation k."""
        document = int(self.numbers[k])
        ids = self.file.read(document, 0, int(self.file.lengths[document]))
        return (ids >> 1).astype(np.int32), (ids & 1).astype(bool)


@dataclasses.dataclass(frozen=True)
class ChatSet:
    """A source, tokenised and split. counts: what was read, learnt and left out, by a word for it.
    held_out: None when nothing is held out."""

    name: str
    weight: float
    train: Chats
    held_out: Chats | None
    counts: Mapping[str, int]
    fingerprint: str


def open_chats(
    cfg: ChatDataConfig,
    sources: Sequence[tuple[str, float, Source]],
    tokenizer: Tokenizer,
    chat: Chat,
    seq_len: int,
    cache: Path,
    say: Callable[[str], None] = print,
) -> list[ChatSet]:
    """Returns the sources tokenised, from the cache where possible.

    Raises: UserError for a conversation that cannot be read, learnt or is too long, where the
    configuration says so, and for a source of which nothing can be learnt.
    """
    assert chat.template is not None
    sets = []
    for name, weight, source in sources:
        template = json.dumps(dataclasses.astuple(chat.template))
        how = f"{cfg.too_long} {cfg.faulty}"
        state = mix(FORMAT, _state(name), tokenizer.identity, template, seq_len, how)
        folder = cache / "chats" / f"{state:016x}"
        if not is_whole(folder):
            say(f"tokenising {name}: {len(source):,} conversations")
            fill = functools.partial(_tokenise, cfg, source, tokenizer, chat, seq_len)
            try:
                make_folder(folder, fill)
            except OSError as error:
                raise UserError(
                    f"cannot write to the cache {folder}: {error.strerror or error}; name a folder "
                    "that can be written (--cache_dir)"
                ) from None
        file = TokenFile(folder / "tokens", 2 * tokenizer.vocab)
        keys = np.load(folder / "keys.npy", allow_pickle=False)
        counts = files.read_object(folder / "counts.json", 2**20)
        limit = int(cfg.holdout * 2**64)
        low, high = int(keys.min()), int(keys.max())
        held = np.array(
            [
                limit > 0 and low != high and (int(k) < limit or int(k) == low) and int(k) != high
                for k in keys
            ]
        )
        sizes = file.lengths.astype(np.int64) - 1
        sides = [Chats(file, n, sizes[n]) for n in (np.flatnonzero(~held), np.flatnonzero(held))]
        print_ = f"{state:016x} {cfg.holdout:g}"
        sets.append(ChatSet(name, weight, sides[0], sides[1] or None, counts, print_))
    return sets


def _tokenise(
    cfg: ChatDataConfig,
    source: Source,
    tokenizer: Tokenizer,
    chat: Chat,
    seq_len: int,
    folder: Path,
) -> None:
    """Writes tokens.bin, tokens.idx, keys.npy (of the sides) and counts.json. Raises: UserError."""
    counts: Counter[str] = Counter()
    keys, reason = [], ""
    with TokenWriter(folder / "tokens", 2 * tokenizer.vocab) as writer:
        for k in range(len(source)):
            try:
                record: Any = source[k]
                made = learnt(record, tokenizer, chat)
            except UserError as error:
                if cfg.faulty == "error":
                    raise
                counts["conversations that cannot be used"] += 1
                reason = reason or str(error)
                continue
            counts["conversations"] += 1
            for skipped in made[0].skipped.values():
                counts[f"answers that cannot be learnt: {skipped:.160}"] += 1
            for row in made:
                fitted = fit(row, seq_len) if cfg.too_long == "cut" else row
                if len(row.ids) > seq_len + 1:
                    if cfg.too_long == "error":
                        raise UserError(
                            f"{record.where} has {len(row.ids):,} tokens; a row of train.seq_len="
                            f"{seq_len:,} holds {seq_len + 1:,} (--train.seq_len, --data.too_long)"
                        )
                    short = fitted is not None and cfg.too_long == "cut"
                    counts["cut behind an answer" if short else "left out, too long"] += 1
                    if not short:
                        continue
                assert fitted is not None
                writer.add(fitted.tokens * 2 + fitted.mask)
                keys.append(text_key(record.asked))
                counts["tokens"] += len(fitted.ids)
                counts["tokens that are learnt"] += int(fitted.mask.sum())
    if not keys:
        said = ", ".join(f"{n:,} {what}" for what, n in counts.items())
        raise UserError(
            f"data.source={source.name} has nothing to learn: {said}"
            f"{f'; the first reason: {reason:.300}' if reason else ''} (--data.source, "
            "--train.seq_len)"
        )
    np.save(folder / "keys.npy", np.array(keys, np.uint64))
    (folder / "counts.json").write_text(json.dumps(counts) + "\n")


def learnt(record: Conversation, tokenizer: Tokenizer, chat: Chat) -> list[ChatRow]:
    """Returns the rows of a conversation, as chat.conversation_rows has them.

    Thinking that stands as <think>...</think> in an answer is given to a template that reads
    reasoning_content, so that its tokens are the template's.
    Raises: UserError naming the conversation.
    """
    messages: list[dict[str, Any]] = record.messages
    if chat.template is not None and "reasoning_content" in chat.template.source:
        messages = [_with_thought(m) for m in messages]
    try:
        more = {"tools": record.tools} if record.tools else {}
        return conversation_rows(messages, tokenizer, chat, more)
    except UserError as error:
        raise UserError(f"{record.where}: {error} (--data.source, --chat_template)") from None


def _with_thought(message: dict[str, Any]) -> dict[str, Any]:
    thought = THOUGHT.match(message["content"])
    if message["role"] != "assistant" or thought is None or "reasoning_content" in message:
        return message
    content = message["content"][thought.end() :]
    return {**message, "content": content, "reasoning_content": thought[1].strip("\n")}


def fit(row: ChatRow, seq_len: int) -> ChatRow | None:
    """Returns a row of at most seq_len + 1 tokens, which ends behind an answer; None: no answer
    fits. (A row of seq_len places has the last token as a target only.)"""
    if len(row.ids) <= seq_len + 1:
        return row
    spans = tuple(span for span in row.spans if span[1] <= seq_len + 1)
    return dataclasses.replace(row, ids=row.ids[: spans[-1][1]], spans=spans) if spans else None


# ---- rows


class ChatRows:
    """An endless sequence of rows of conversations; each epoch has every row once."""

    def __init__(self, chats: Chats, seq_len: int, seed: int, shuffle: bool = True):
        """seed: of which conversations share a row, and of the order of rows."""
        self._chats, self._seq_len, self._seed, self._shuffle = chats, seq_len, seed, shuffle
        order = np.arange(len(chats))
        if shuffle:  # RandomState: NumPy promises that its stream never changes
            order = np.random.RandomState(mix(seed, "chats") % 2**32).permutation(len(chats))
        open_rows = OPEN_ROWS if shuffle else 1
        self._bins = packed(order.tolist(), chats.sizes[:, None], (seq_len,), open_rows)

    @property
    def rows_per_epoch(self) -> int:
        """Rows with all conversations."""
        return len(self._bins)

    @property
    def fill(self) -> float:
        """The fraction of all places that conversations take."""
        return float(self._chats.sizes.sum() / (self._seq_len * len(self._bins)))

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i: tokens_S, targets_S (IGNORED where nothing is learnt), segments_S (from 1;
        -1: dead), positions_S, all int32."""
        epoch, place = divmod(i, len(self._bins))
        if self._shuffle:
            place = permute(place, len(self._bins), mix(self._seed, epoch, "rows"))
        S = self._seq_len
        row = {
            "tokens": np.full(S, PAD, np.int32),
            "targets": np.full(S, IGNORED, np.int32),
            "segments": np.full(S, -1, np.int32),
            "positions": np.zeros(S, np.int32),
        }
        at = 0
        for segment, k in enumerate(self._bins[place], 1):
            tokens, mask = self._chats.read(k)
            span = slice(at, at + len(tokens) - 1)
            row["tokens"][span] = tokens[:-1]
            row["targets"][span] = np.where(mask[1:], tokens[1:], IGNORED)
            row["segments"][span] = segment
            row["positions"][span] = np.arange(len(tokens) - 1)
            at = span.stop
        return row


def training_rows(sets: Sequence[ChatSet], seq_len: int, seed: int) -> Any:
    """Returns the shuffled, packed, mixed training rows. Raises: UserError where a source has no
    conversation to learn from."""
    for s in sets:
        if not len(s.train):
            raise UserError(
                f"data.source={s.name} has no conversation to learn from (--data.holdout)"
            )
    rows: list[Any] = [ChatRows(s.train, seq_len, seed) for s in sets]
    return rows[0] if len(rows) == 1 else MixedRows(rows, [s.weight for s in sets], seed)


def marked(
    row: Mapping[str, np.ndarray], tokenizer: Tokenizer, marks: tuple[str, str] = ("[", "]")
) -> str:
    """Returns a row as text with special tokens, what is learnt between marks; a line before each
    conversation says its number."""
    parts = []
    for segment in range(1, int(row["segments"].max(initial=0)) + 1):
        places = np.flatnonzero(row["segments"] == segment)
        targets = row["targets"][places]
        tokens = [*row["tokens"][places].tolist()]
        # Of each token but the first whether it is learnt, which the target before it says.
        is_learnt = [False, *(targets >= 0).tolist()]
        tokens.append(int(targets[-1]) if targets[-1] >= 0 else -1)
        parts.append(f"--- conversation {segment}\n")
        begin = 0
        for i in range(1, len(tokens) + 1):
            if i == len(tokens) or is_learnt[i] != is_learnt[begin]:
                ids = [t for t in tokens[begin:i] if t >= 0]
                text = _visible(tokenizer.decode(ids, special=True))
                parts.append(f"{marks[0]}{text}{marks[1]}" if is_learnt[begin] else text)
                begin = i
        parts.append("\n")
    return "".join(parts)


def _visible(text: str) -> str:
    """Returns a text without characters that move a terminal's cursor."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
