"""The fixed texts of `bench pipeline`: a file to be quoted, twenty prompts, and text of any length.

Decides only texts. The twenty are chosen so that drafting has little to find: novel prose, verse, several
languages, code, lists, tables; they are never changed to please a figure.
"""

from __future__ import annotations

import random

FILE = '''"""Reads and writes dates of the calendar file."""

from datetime import date, timedelta

FORMAT = "%Y-%m-%d"
WEEK = timedelta(days=7)


def parse_day(text):
    """Reads a day such as 2024-02-29."""
    year, month, day = text.strip().split("-")
    return date(int(year), int(month), int(day))


def format_day(value):
    """Writes a day as it is read."""
    return value.strftime(FORMAT)


def next_week(value):
    """The same day a week later."""
    return value + WEEK


def days_between(first, last):
    """How many days lie between two days, the last one counted."""
    if last < first:
        raise ValueError("the last day lies before the first")
    return (last - first).days + 1


def read_calendar(path):
    """Reads a day and a note from each line; empty lines are left out."""
    notes = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                day, note = line.rstrip().split(" ", 1)
                notes[parse_day(day)] = note
    return notes


def write_calendar(path, notes):
    """Writes one line for each day, the earliest first."""
    with open(path, "w", encoding="utf-8") as lines:
        for day in sorted(notes):
            lines.write(f"{format_day(day)} {notes[day]}\\n")
'''

# Lines of the second copy that the agent has written already.
_BEGUN_LINES = 24


def quoting_prompt() -> str:
    """An agent writes a file again with one function renamed, and is a third through it."""
    begun = FILE.replace("parse_day", "read_day").splitlines(keepends=True)[:_BEGUN_LINES]
    return (
        f"<|im_start|>user\nThe file src/days.py:\n```python\n{FILE}```\n"
        "Rename parse_day to read_day and write the whole file again, otherwise unchanged.<|im_end|>\n"
        f"<|im_start|>assistant\nThe file src/days.py:\n```python\n{''.join(begun)}"
    )


TWENTY: tuple[str, ...] = (
    "The harbour lay under fog when Marta found the letter, and nobody had yet asked why the lamp",
    "Once upon a time a clockmaker lost the hour between three and four. He searched",
    "My grandmother kept bees, not for honey but because",
    "It was the kind of winter in which even the crows walked. Down by the mill,",
    "On the ninth day of the march the sergeant told them a story about a river that",
    "Shall I compare the engine's patient song\nTo rivers that have never learned to rest?\n",
    "The capital of France is",
    "Photosynthesis is the process by which",
    "In 1847 a physician in Vienna noticed that",
    "To sharpen a kitchen knife, first",
    "Der Zug nach Norden hatte Verspätung, und auf dem Bahnsteig",
    "Il pleuvait depuis trois jours quand le facteur",
    "El viejo pescador miró el mar y",
    "def median(values: list[float]) -> float:\n    ",
    "SELECT customer, sum(total) FROM orders WHERE",
    "#include <stdio.h>\n\nint main(void) {\n    ",
    "| city | river | inhabitants |\n|---|---|---|\n| Paris | Seine | 2,100,000 |\n|",
    "Shopping list:\n- two lemons\n- a loaf of rye\n- ",
    "<|im_start|>user\nTell me a short story about a lighthouse.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhy is the sky blue? Answer in three sentences.<|im_end|>\n<|im_start|>assistant\n",
)

_SUBJECTS = (
    "The miller",
    "A captain",
    "Her brother",
    "The printer",
    "An old nurse",
    "The surveyor",
)
_VERBS = ("counted", "sold", "forgot", "painted", "hid", "measured", "repaired", "described")
_OBJECTS = ("seven barrels", "the north gate", "a brass key", "two letters", "the ferry", "a map")
_TIMES = ("before dawn", "in the second year", "without a word", "at the fair", "after the flood")


def prose(seed: int, sentences: int) -> str:
    """Sentences that do not repeat for long; the same for the same seed."""
    rng = random.Random(f"prose/{seed}")
    return " ".join(
        f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)} "
        f"{rng.choice(_TIMES)}, {rng.randrange(2, 999)} steps away."
        for _ in range(sentences)
    )
