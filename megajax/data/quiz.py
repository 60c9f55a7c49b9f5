"""A small made set of chats: short questions, each answered in one taught form, `ANSWER: ...`.

It is what fine-tuning on chats learns where nobody names a set (data.source=quiz): a trained model
learns the form in some dozen steps, and whether it did can be read off its answers. Chat k is a
function of k. A chat has one to three turns; every third has a system message.
"""

import random
from typing import Any

SIZE = 500  # (chosen) chats of the set
FORM = "ANSWER: "
SYSTEM = "Answer in one line."

OPPOSITES = (
    "hot cold,big small,up down,fast slow,old new,day night,open shut,wet dry,left right,"
    "light dark,early late,soft hard,empty full,near far"
).split(",")
WORDS = (
    "river stone apple tiger cloud paper music silver garden window orange castle planet "
    "bridge pocket letter market winter summer copper"
).split()
ASKS = ("What is", "Tell me", "Please say", "I need", "Give me")


def question(rng: random.Random) -> tuple[str, str]:
    """Returns a question and what answers it."""
    kind, ask = rng.randrange(5), rng.choice(ASKS)
    if kind == 0:
        a, b = rng.randrange(10), rng.randrange(10)
        return f"{ask} {a} plus {b}.", str(a + b)
    if kind == 1:
        pair = rng.choice(OPPOSITES).split()
        rng.shuffle(pair)
        return f"{ask} the opposite of {pair[0]}.", pair[1]
    word = rng.choice(WORDS)
    if kind == 2:
        return f"{ask} the first letter of {word}.", word[0]
    if kind == 3:
        return f"{ask} the last letter of {word}.", word[-1]
    return f"{ask} the word {word} in capitals.", word.upper()


def messages(k: int) -> list[dict[str, Any]]:
    """Returns the messages of chat k."""
    rng = random.Random(k)
    made = [{"role": "system", "content": SYSTEM}] if k % 3 == 2 else []
    for _ in range(1 + k % 3 % 2 + (k % 7 == 0)):
        asked, answer = question(rng)
        made += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": f"{FORM}{answer}"},
        ]
    return made
