"""Text from tokens: no half character, no text behind a stop string, pieces that add up."""

import random

import pytest
import tokenizers
from tokenizers import decoders, models

from megajax.data.tokenizer import ByteTokenizer, FileTokenizer, train_bpe
from megajax.systems.server.answers import UNKNOWN, Decoder, Stopper, pieces_of

TEXT = "def f(x): return 'é日本👍🏽'  # zwei  Wörter\n\tüber"


def stream(tokenizer, ids, strip=False):
    decoder = Decoder(tokenizer, pieces_of(tokenizer), strip)
    return [*(decoder.add(i) for i in ids), decoder.finish()]


def words(folder):
    """A tokenizer whose tokens do not stand for bytes."""
    vocab = {"[UNK]": 0, "hello": 1, "##ing": 2, "wörld": 3, "!": 4}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.save(str(folder / "tokenizer.json"))
    return FileTokenizer(folder / "tokenizer.json", "words")


def bpe(folder):
    train_bpe([TEXT] * 3, 300, folder / "tokenizer.json")
    return FileTokenizer(folder / "tokenizer.json", "bpe")


@pytest.mark.parametrize("make", [lambda _: ByteTokenizer(), bpe])
def test_a_character_comes_whole_with_its_last_token(make, tmp_path):
    tokenizer = make(tmp_path)
    parts = stream(tokenizer, tokenizer.encode([TEXT])[0].tolist())
    assert "".join(parts) == TEXT
    assert not any(UNKNOWN in part for part in parts)
    assert "" in parts, "a token ended inside a character"


@pytest.mark.parametrize("make", [lambda _: ByteTokenizer(), bpe, words])
def test_pieces_add_up_to_the_whole_text_whatever_the_tokens(make, tmp_path):
    tokenizer, rng = make(tmp_path), random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab) for _ in range(rng.randint(0, 30))]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_words_space_is_kept_and_the_first_one_dropped_if_asked(tmp_path):
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3} | {f"<0x{b:02X}>": 4 + b for b in range(256)}
    made = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", "sp")
    assert tokenizer.strips_space
    ids = [1, 2, 3, *(4 + b for b in "é".encode()), 1]
    assert stream(tokenizer, ids) == [" a", " b", "c", "", "é", " a", ""]
    assert "".join(stream(tokenizer, ids, strip=True)) == tokenizer.decode(ids) == "a bcé a"


def cut(stops, parts, include=False):
    stopper, shown = Stopper(stops, include), []
    for part in parts:
        shown.append(stopper.add(part))
        if stopper.stopped:
            return shown, True
    return [*shown, stopper.finish()], False


def test_a_stop_string_is_cut_wherever_it_is_split():
    rng = random.Random(1)
    for _ in range(2000):
        text = "".join(rng.choices("ab\n", k=rng.randint(0, 14)))
        stops = [
            "".join(rng.choices("ab\n", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))
        ]
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        shown, stopped = cut(stops, parts)
        places = [at for stop in stops if (at := text.find(stop)) >= 0]
        # A stop string that ends first wins over one that begins first and comes later.
        ends = min((text.find(s) + len(s) for s in stops if s in text), default=None)
        assert stopped == bool(places)
        if not stopped:
            assert "".join(shown) == text
        else:
            assert text.startswith("".join(shown)) and len("".join(shown)) <= ends
            assert not any(stop in "".join(shown) for stop in stops)


def test_nothing_of_a_stop_string_is_shown_before_it_is_known():
    assert cut(["END"], ["aE", "N", "Dx"]) == (["a", "", ""], True)
    assert cut(["END"], ["aE", "N", "x"]) == (["a", "", "ENx", ""], False)
    assert cut(["END"], ["aE", "N"]) == (["a", "", "EN"], False)
    assert cut(["END"], ["aEN", "Dx"], include=True) == (["a", "END"], True)
