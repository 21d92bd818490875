"""Prompts of many kinds, from one-word questions to stories: what a model's answer lengths are recorded with."""

from __future__ import annotations

import itertools

import numpy as np

TOPICS = (
    "the ocean", "photosynthesis", "the Roman Empire", "electric cars", "honey bees", "the French Revolution",
    "black holes", "chess", "coffee", "vaccines", "volcanoes", "jazz music", "solar panels", "the human heart",
    "whales", "the printing press", "gravity", "bicycles", "the Amazon rainforest", "ancient Egypt", "computers",
    "mountain climbing", "bread baking", "the Moon", "football", "inflation", "rivers", "dreams", "tea", "libraries",
)  # fmt: skip
COUNTRIES = (
    "France", "Japan", "Brazil", "Kenya", "Canada", "Egypt", "Norway", "India", "Peru", "Australia", "Spain",
    "Turkey", "Mexico", "Poland", "Vietnam", "Chile", "Greece", "Iran", "Ghana", "Finland",
)  # fmt: skip
SENTENCES = (
    "The train was late again, so we walked home in the rain.",
    "I would like to book a table for two on Friday evening.",
    "The new phone has a good camera, but the battery is a disappointment.",
    "She opened the old box and found a letter from her grandmother.",
    "Our team finished the project two weeks before the deadline.",
    "The soup was cold and the waiter was rude.",
    "Scientists have found a new species of frog in the mountains.",
    "Please send me the report before the meeting tomorrow.",
    "This film is the best that I have seen this year.",
    "The city will build three new schools and a park by the river.",
    "He forgot his keys at the office and had to wait outside.",
    "Prices of vegetables rose sharply after the long drought.",
)
TASKS = (
    "reverses a string", "checks whether a number is prime", "sorts a list of numbers", "counts the words in a text",
    "finds the largest number in a list", "computes the factorial of n", "removes duplicates from a list",
    "reads a CSV file", "merges two dictionaries", "checks whether a word is a palindrome",
    "converts Celsius to Fahrenheit", "computes the Fibonacci sequence",
)  # fmt: skip
LANGUAGES = ("French", "Spanish", "German", "Italian")
SIZES = ("3", "5", "10", "20")

#: kind -> templates; {topic}, {country}, {sentence}, {task}, {language}, {size}, {a} and {b} are filled in.
TEMPLATES: dict[str, tuple[str, ...]] = {
    "one_word": (
        "What is the capital of {country}? Answer with one word.",
        "In one word: which language is spoken in {country}?",
        "Name one thing that has to do with {topic}. One word only.",
    ),
    "yes_no": ("Is {country} larger than France? Answer yes or no.", "Can {topic} be dangerous? Just say yes or no."),
    "number": ("What is {a} + {b}? Give only the number.", "Compute {a} times {b}. Reply with the result alone."),
    "sentiment": ('Is this sentence positive or negative? One word. "{sentence}"',),
    "sentence": ("Tell me about {topic} in one sentence.", "Describe {country} in a single short sentence."),
    "translate": ('Translate into {language}: "{sentence}"', "How do you say this in {language}? {sentence}"),
    "rewrite": ('Rewrite this sentence more politely: "{sentence}"', 'Correct the grammar: "{sentence}"'),
    "title": ("Suggest one title for an article about {topic}.",),
    "list": ("List {size} facts about {topic}.", "Give me {size} ideas for a trip to {country}."),
    "words": ("List {size} words that have to do with {topic}, separated by commas.",),
    "define": ("What is meant by {topic}?", "Define {topic}."),
    "explain": ("Explain {topic} to a child.", "Explain in detail how {topic} came to matter to people."),
    "compare": ("Compare {topic} and {other}.", "What are the differences between {topic} and {other}?"),
    "steps": ("How do I get started with {topic}? Give step by step instructions.",),
    "code": ("Write a Python function that {task}.", "Write a program in JavaScript that {task}, with comments."),
    "email": ("Write an email to my boss about {topic}.", "Write a short email to a hotel in {country}."),
    "story": ("Write a story about {topic}.", "Write a long story that takes place in {country}."),
    "poem": ("Write a haiku about {topic}.", "Write a poem about {topic} with four verses."),
    "essay": ("Write an essay about {topic}.", "Write an essay about the history of {country}."),
    "summary": ("Summarise in a few words: {passage}", "What is this text about? {passage}"),
}


def kinds() -> list[str]:
    """Kinds of prompts, sorted."""
    return sorted(TEMPLATES)


def draw(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """`count` (kind, text) pairs, no text twice; the kinds take turns, so that all are there as often."""
    drawn: dict[str, str] = {}
    misses = 0
    for kind in itertools.cycle(kinds()):
        if len(drawn) == count:
            return [(kind, text) for text, kind in drawn.items()]
        text = _fill(TEMPLATES[kind][rng.integers(len(TEMPLATES[kind]))], rng)
        misses = misses + 1 if text in drawn else 0
        if misses > 10_000:
            raise ValueError(f"there are not {count} different prompts; ask for at most {len(drawn)}")
        drawn.setdefault(text, kind)
    raise AssertionError("a cycle does not end")


def _fill(template: str, rng: np.random.Generator) -> str:
    topic, other = rng.choice(TOPICS, 2, replace=False)
    fillers = {
        "topic": topic,
        "other": other,
        "country": rng.choice(COUNTRIES),
        "sentence": rng.choice(SENTENCES),
        "passage": " ".join(rng.permutation(SENTENCES)[: rng.integers(3, len(SENTENCES))]),
        "task": rng.choice(TASKS),
        "language": rng.choice(LANGUAGES),
        "size": rng.choice(SIZES),
        "a": rng.integers(10, 1000),
        "b": rng.integers(2, 100),
    }
    return template.format(**fillers)
