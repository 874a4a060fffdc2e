"""The words of the playground, by category.

The categories share no word, so a word's tag is unique and a sentence is parsed by looking up its sequence of tags (see
grammar.py). Every word that may follow "a" begins with a consonant, so the grammar needs no "an".
"""

GIRLS = ("Mia", "Lily", "Rosa", "Nina", "Emma", "Sara", "Kate")
BOYS = ("Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Finn")

CATEGORIES: dict[str, tuple[str, ...]] = {
    "name": GIRLS + BOYS,
    "pronoun": ("she", "he"),
    "child": ("girl", "boy"),
    "animal": (
        *("dog", "cat", "horse", "cow", "pig", "goat", "sheep", "rabbit"),
        *("mouse", "fox", "bear", "duck", "frog", "hen", "lion", "bird"),
    ),
    "food": (
        *("bread", "milk", "soup", "cake", "rice", "cheese", "honey"),
        *("jam", "corn", "salad", "pie", "butter", "pasta", "beans"),
    ),
    "color": ("red", "blue", "green", "yellow", "brown", "black", "white", "pink", "purple", "gray"),
    "thing": (
        *("ball", "kite", "lamp", "box", "book", "cup", "drum", "boat", "hat", "bell"),
        *("doll", "coat", "key", "basket", "rope", "bag", "bowl", "chair", "clock", "spoon"),
    ),
    "place": (
        *("garden", "park", "barn", "river", "forest", "school", "market"),
        *("kitchen", "beach", "hill", "bridge", "farm", "village", "lake"),
    ),
    "feeling": ("happy", "sad", "tired", "proud", "brave", "calm", "scared", "hungry"),
    "job": ("baker", "farmer", "teacher", "doctor", "nurse", "painter", "driver", "sailor", "cook", "king"),
    "size": ("big", "small", "new", "nice", "little", "pretty"),
    "tool": ("soap", "brush", "glue", "paper", "pencil", "broom", "thread", "cart"),
    "deed": ("wash", "paint", "fix", "wrap", "draw", "clean", "mend", "move"),
    "misdeed": ("steal", "break", "burn", "smash", "ruin", "hide"),
}

TAG_OF: dict[str, str] = {word: tag for tag, words in CATEGORIES.items() for word in words}
assert len(TAG_OF) == sum(map(len, CATEGORIES.values())), "a word stands in two categories"

# The tool that a harmless deed needs: the only world knowledge that a prompt does not state.
TOOL_OF: dict[str, str] = dict(zip(CATEGORIES["deed"], CATEGORIES["tool"], strict=True))

# The categories that a prompt may ask a list of, by the plural that it uses.
LIST_CATEGORIES: dict[str, str] = {
    "animals": "animal",
    "foods": "food",
    "colors": "color",
    "things": "thing",
    "places": "place",
    "feelings": "feeling",
    "jobs": "job",
    "names": "name",
}

# Categories whose words a story may be told to use.
STORY_CATEGORIES = ("animal", "food", "color", "thing", "place", "feeling", "job")

_NUMBER_NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS: dict[str, int] = {name: number for number, name in enumerate(_NUMBER_NAMES, start=2)}
NUMBER_WORDS: dict[int, str] = {number: word for word, number in NUMBERS.items()}

ORDINALS: dict[int, tuple[str, ...]] = {
    2: ("First", "Last"),
    3: ("First", "Next", "Last"),
    4: ("First", "Next", "Then", "Last"),
}


def pronoun_of(name: str) -> str:
    """ "she" or "he" for a name of this world."""
    return "she" if name in GIRLS else "he"


def child_of(name: str) -> str:
    """ "girl" or "boy" for a name of this world."""
    return "girl" if name in GIRLS else "boy"


def join_words(words: tuple[str, ...], last: str) -> str:
    """("a", "b", "c") with last "and" gives "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
