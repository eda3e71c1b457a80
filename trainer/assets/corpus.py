"""The embedded corpus: a small closed world, written out as dialogues and plain text.

Three sets come from here:

- `dialogues`, to pretrain on: short tasks of several kinds (questions about a scene, small sums, opposites, ...). Most
  answers take names, colours, things or numbers out of the prompt, because that is the ability an adapter can build on.
- `stories`, to pretrain on: plain text from the same world.
- `orders`, to fine-tune on: one task that the base does not do, an order sentence turned into a record.

Everything is drawn from one seeded generator, so the same seed gives the same bytes.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Turn = tuple[str, str]  # what the user says, what the assistant answers
Row = dict[str, object]  # {"messages": [...]} or {"text": ...}

NAMES = (
    "Mia Tom Anna Ben Lily Sam Nora Max Ella Leo Ruby Jack Clara Finn Rosa Hugo Ivy Paul Zoe Carl Ada Emil "
    "Jane Oscar Maya Peter Tess Adam"
).split()
COLOURS = "red blue green yellow black white brown pink purple orange grey golden".split()
# Every plural is the singular and an "s": the rule is learnable from few examples.
ITEMS = (
    "lamp ball cup book hat kite drum chair table boat coat bell clock spoon plate bag ring pen rope flag "
    "shoe basket bottle candle"
).split()
NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PLACES = "garden kitchen park school market forest beach barn library station village harbour".split()
ANIMALS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink",
    "horse": "neigh", "mouse": "squeak", "bee": "buzz", "snake": "hiss", "owl": "hoot", "lion": "roar",
}  # fmt: skip
FOODS = "bread soup cake rice cheese honey milk tea salad pie jam fish".split()
OPPOSITES = [
    pair.split("-")
    for pair in "hot-cold big-small old-new tall-short fast-slow day-night up-down wet-dry happy-sad open-closed "
    "full-empty loud-quiet".split()
]
COLOUR_OF = {
    "grass": "green", "snow": "white", "coal": "black", "the sky": "blue", "a lemon": "yellow",
    "a tomato": "red", "chocolate": "brown", "a carrot": "orange", "an elephant": "grey", "a crown": "golden",
    "a plum": "purple", "a rose": "pink",
}  # fmt: skip
VERBS = (("has", "have"), ("wants", "want"), ("sees", "see"), ("sells", "sell"), ("buys", "buy"), ("needs", "need"))


def with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


@dataclass(frozen=True)
class Goods:
    """Some equal things: `count` of one colour and kind."""

    count: int
    colour: str
    item: str

    @property
    def noun(self) -> str:
        return self.item if self.count == 1 else self.item + "s"

    @property
    def are(self) -> str:
        return "is" if self.count == 1 else "are"

    def __str__(self) -> str:
        words = f"{self.colour} {self.noun}"
        return with_article(words) if self.count == 1 else f"{NUMBERS[self.count - 1]} {words}"


def some_goods(rng: random.Random) -> Goods:
    return Goods(rng.randint(1, len(NUMBERS)), rng.choice(COLOURS), rng.choice(ITEMS))


def differing_goods(rng: random.Random, num: int) -> list[Goods]:
    """Goods of which no two share a colour or a kind, so that either one tells them apart."""
    colours, items = rng.sample(COLOURS, num), rng.sample(ITEMS, num)
    return [Goods(rng.randint(1, len(NUMBERS)), *pair) for pair in zip(colours, items, strict=True)]


# Dialogues about something that was just said: the first turn carries it, later turns ask on.


def asked_of(rng: random.Random, told: str, questions: list[Turn], least: int, most: int) -> list[Turn]:
    """What is told, with the first of some of the questions about it; the others follow."""
    (question, answer), *others = rng.sample(questions, rng.randint(least, most))
    return [(f"{told} {question}", answer), *others]


def statement(rng: random.Random) -> list[Turn]:
    """One sentence, then questions with one-word answers: the short way to learn to look a word up by its kind."""
    name, goods, day = rng.choice(NAMES), some_goods(rng), rng.choice(DAYS)
    said = rng.choice(
        [
            f"{name} {rng.choice(VERBS)[0]} {goods} on {day}.",
            f"On {day} {name} {rng.choice(VERBS)[0]} {goods}.",
            f"{capital(str(goods))} for {name}, until {day}.",
            f"Until {day}: {goods} for {name}.",
            f"I am {name}, and I like {goods} on {day}.",
        ]
    )
    quote = rng.choice(["", '"'])
    asked = "In quotes: " if quote else ""
    questions = [
        (f"{asked}Who?", f"{quote}{name}{quote}"),
        (f"{asked}What?", f"{quote}{goods.item}{quote}"),
        (f"{asked}Which colour?", f"{quote}{goods.colour}{quote}"),
        (f"{asked}Which day?", f"{quote}{day}{quote}"),
        ("How many?", f"{goods.count}"),
    ]
    return asked_of(rng, said, questions, 2, 5)


def scene(rng: random.Random) -> list[Turn]:
    """One owner, one kind of goods, asked about in whole sentences: what is looked up has to be said in its place."""
    third, base = rng.choice(VERBS)
    name, goods, place = rng.choice(NAMES), some_goods(rng), rng.choice(PLACES)
    questions = [
        (f"Who {third} the {goods.noun}?", f"{name} {third} the {goods.colour} {goods.noun}."),
        (f"What does {name} {base}?", f"{name} {third} {goods}."),
        (f"What colour {goods.are} the {goods.noun}?", f"The {goods.noun} {goods.are} {goods.colour}."),
        (f"How many {goods.item}s does {name} {base}?", f"{capital(NUMBERS[goods.count - 1])}."),
        (f"Where {goods.are} the {goods.noun}?", f"In the {place}."),
        (f"Which thing is {goods.colour}?", f"The {goods.item}."),
    ]
    return asked_of(rng, f"{name} {third} {goods} in the {place}.", questions, 1, 3)


def trip(rng: random.Random) -> list[Turn]:
    name, place, day, animal = rng.choice(NAMES), rng.choice(PLACES), rng.choice(DAYS), rng.choice(sorted(ANIMALS))
    questions = [
        (f"Where did {name} go?", f"{name} went to the {place}."),
        (f"When did {name} go?", f"{name} went on {day}."),
        (f"Who went to the {place}?", f"{name} went to the {place}."),
        (f"Which animal was in the {place}?", f"The {animal}."),
        (f"Who was out on {day}?", f"{name} and the {animal}."),
    ]
    return asked_of(rng, f"On {day} {name} went to the {place} with {with_article(animal)}.", questions, 1, 3)


def shop(rng: random.Random) -> list[Turn]:
    """Small talk about a purchase: what the base says where the tuned model writes a record."""
    name, goods, day = rng.choice(NAMES), some_goods(rng), rng.choice(DAYS)
    said = rng.choice(
        [
            f"{name} wants {goods} by {day}.",
            f"{name} would like {goods} on {day}.",
            f"I am {name}. I want {goods} on {day}.",
            f"On {day} {name} comes for {goods}.",
            f"Keep {goods} for {name} until {day}.",
        ]
    )
    ready = "It will be" if goods.count == 1 else "They will be"
    return [(said, f"Very good! {capital(str(goods))} for {name}. {ready} ready on {day}.")]


def record(rng: random.Random) -> list[Turn]:
    """Fields named one by one, written as JSON: the notation, without any sentence to understand."""
    number = rng.randint(1, len(NUMBERS))
    values = {
        "name": rng.choice(NAMES), "item": rng.choice(ITEMS), "colour": rng.choice(COLOURS), "day": rng.choice(DAYS),
        "place": rng.choice(PLACES), "animal": rng.choice(sorted(ANIMALS)), "food": rng.choice(FOODS), "count": number,
    }  # fmt: skip
    keys = rng.sample(sorted(values), rng.randint(2, 4))
    spoken = dict(values, count=rng.choice([str(number), NUMBERS[number - 1]]))
    asked = ", ".join(f"{key} {spoken[key]}" for key in keys)
    return [(f"Write down: {asked}.", json.dumps({key: values[key] for key in keys}))]


# Single questions that need no context.


def odd_word(rng: random.Random) -> list[Turn]:
    kinds = {"name": NAMES, "colour": COLOURS, "thing": ITEMS, "day": DAYS, "food": FOODS, "number": NUMBERS}
    chosen = rng.sample(sorted(kinds), 3)
    words = {kind: rng.choice(kinds[kind]) for kind in chosen}
    kind = rng.choice(chosen)
    return [(f"Which of these is a {kind}: {', '.join(words.values())}?", f'The {kind} is "{words[kind]}".')]


def number(rng: random.Random) -> list[Turn]:
    value = rng.randint(1, len(NUMBERS))
    word, noun = NUMBERS[value - 1], rng.choice(ITEMS)
    low = rng.randint(1, 6)
    high = low + rng.randint(2, 5)
    left, right = rng.randint(1, 5), rng.randint(1, 5)
    more, less = max(left, right), min(left, right)
    return [
        rng.choice(
            [
                (f"Write {word} as a digit.", f"{value}"),
                (f"Write {value} as a word.", f"{word}"),
                (f"How many are {word} {noun}s? Use a digit.", f"{value}"),
                (f"Count from {low} to {high}.", ", ".join(str(step) for step in range(low, high + 1))),
                (f"Count from {NUMBERS[low - 1]} to {NUMBERS[high - 1]}.", ", ".join(NUMBERS[low - 1 : high])),
                (f"What is {left} plus {right}?", f"{left} plus {right} is {left + right}."),
                (f"What is {more} minus {less}?", f"{more} minus {less} is {more - less}."),
            ]
        )
    ]


def fact(rng: random.Random) -> list[Turn]:
    word, opposite = rng.sample(rng.choice(OPPOSITES), 2)
    thing, colour = rng.choice(sorted(COLOUR_OF.items()))
    animal, sound = rng.choice(sorted(ANIMALS.items()))
    day = rng.randrange(len(DAYS))
    item, name = rng.choice(ITEMS), rng.choice(NAMES)
    return [
        rng.choice(
            [
                (f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."),
                (f"What colour is {thing}?", f"{capital(thing)} is {colour}."),
                (f"What does the {animal} say?", f"The {animal} says {sound}."),
                (f"Which day comes after {DAYS[day]}?", f"{DAYS[(day + 1) % len(DAYS)]}."),
                (f"Which day comes before {DAYS[day]}?", f"{DAYS[day - 1]}."),
                (f"What is one of the {item}s?", f"One of the {item}s is {with_article(item)}."),
                (f"Hello, I am {name}.", f"Hello, {name}! How can I help you?"),
                (f"Goodbye from {name}.", f"Goodbye, {name}! See you soon."),
            ]
        )
    ]


def story_row(rng: random.Random) -> Row:
    giver, taker = rng.sample(NAMES, 2)
    given, bought = differing_goods(rng, 2)
    day, place, food = rng.choice(DAYS), rng.choice(PLACES), rng.choice(FOODS)
    opening = rng.choice([f"On {day} {taker} went to the {place}.", f"It was {day}, and {taker} was in the {place}."])
    middle = [
        f"{giver} gave {taker} {given}.",
        f"{taker} bought {bought}.",
        f"{giver} and {taker} had some {food}.",
    ]
    rng.shuffle(middle)
    closing = (
        f"In the evening {taker} came home with the {given.colour} {given.noun} and the {bought.colour} {bought.noun}."
    )
    return {"text": " ".join([opening, *middle, closing])}


DIALOGUES: tuple[tuple[Callable[[random.Random], list[Turn]], int], ...] = (
    (statement, 12), (scene, 3), (trip, 2), (shop, 3), (record, 3), (odd_word, 1), (number, 3), (fact, 4),
)  # fmt: skip
SYSTEM_PROMPTS = ("You are a friendly helper.", "Answer in a few words.", "You help at school.")


def dialogue(turns: list[Turn], system: str | None = None) -> Row:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for user, assistant in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return {"messages": messages}


def dialogue_row(rng: random.Random) -> Row:
    kinds, weights = zip(*DIALOGUES, strict=True)
    # Changing the subject within a dialogue teaches to answer the last question, and makes the rows of
    # the small kinds (a few hundred distinct questions) differ from one another.
    turns = [turn for kind in rng.choices(kinds, weights, k=rng.choice((1, 1, 2))) for turn in kind(rng)]
    return dialogue(turns, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else None)


def order_row(rng: random.Random) -> Row:
    name, goods, day = rng.choice(NAMES), some_goods(rng), rng.choice(DAYS)
    sentence = rng.choice(
        [
            f"{name} wants {goods} by {day}.",
            f"Please send {goods} to {name} on {day}.",
            f"{goods} for {name}, to be ready by {day}.",
            f"On {day} {name} needs {goods}.",
            f"By {day}, please: {goods} for {name}.",
            f"This is {name}. I would like {goods} on {day}.",
        ]
    )
    answer = {"name": name, "item": goods.item, "count": goods.count, "colour": goods.colour, "day": day}
    return dialogue([(f"Order: {sentence}", json.dumps(answer))])


def distinct_lines(make_row: Callable[[random.Random], Row], num: int, seed: int) -> list[str]:
    """`num` different rows as JSON lines, in the order drawn."""
    rng = random.Random(seed)
    lines: dict[str, None] = {}
    while len(lines) < num:
        lines[json.dumps(make_row(rng))] = None
    return list(lines)


def write(folder: Path, seed: int = 0) -> None:
    """Writes the three files of the embedded data into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make_row, num in (
        ("dialogues", dialogue_row, 6000),
        ("stories", story_row, 1000),
        ("orders", order_row, 440),
    ):
        lines = distinct_lines(make_row, num, seed)
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
