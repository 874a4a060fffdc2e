"""Heed's verdicts on checkable instructions against the published script, as lm-evaluation-harness ships it.

The answers are people's replies and the prompts of IFEval, changed at random towards and away from what each prompt
instructs. It needs lm_eval, NLTK with its data `punkt_tab`, and real data; without them it is skipped.
"""

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evaluation.suites.ifeval import SUITE, variants
from evaluation.suites.suite import Item, Scored, Tools
from reward.verifiers.instructions import WORD_SEPARATORS, count_sentences, detected_language
from tests.evaluation.suites.models import Written, by_prompt

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[harness]'")
nltk = pytest.importorskip("nltk", reason="lm_eval's ifeval needs nltk: pip install nltk immutabledict")
pytest.importorskip("immutabledict", reason="lm_eval's ifeval needs it: pip install nltk immutabledict")

REAL = Path(__file__).parents[4] / "shared" / "data"
SOURCE, TREES = REAL / "benchmarks/ifeval_input_data.jsonl.gz", REAL / "oasst_en_100_tree.jsonl"
if not SOURCE.is_file() or not TREES.is_file():
    pytest.skip(f"{REAL}: no real data", allow_module_level=True)
try:
    nltk.data.find("tokenizers/punkt_tab")
except LookupError:
    pytest.skip("NLTK's data punkt_tab is not installed", allow_module_level=True)

NUM_ANSWERS = 4  # per prompt
# These two use NLTK; the published script's verdict on the others is Heed's, with the exceptions of `explained`.
BY_NLTK = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
OTHER_LANGUAGES = (
    "Das Haus auf dem Hügel ist alt, und niemand hat dort seit vielen Jahren gewohnt.",
    "यह घर पहाड़ी पर है और बहुत पुराना है। वहाँ कोई नहीं रहता।",
    "Nyumba iliyo kwenye kilima ni ya zamani na hakuna mtu aliyeishi huko kwa miaka mingi.",
    "هذا البيت على التل قديم ولم يسكنه أحد منذ سنوات طويلة.",
)


def replies() -> list[str]:
    """Returns the texts of all messages of Open-Assistant's trees."""
    texts: list[str] = []

    def add(node: dict[str, Any]) -> None:
        texts.append(node["text"])
        for reply in node["replies"]:
            add(reply)

    for line in TREES.read_text().splitlines():
        add(json.loads(line)["prompt"])
    return texts


def changed(answer: str, kind: str, given: dict[str, Any], draw: random.Random) -> str:
    """Changes an answer so that it may follow an instruction, or just fail to."""
    near = draw.choice([-1, 0, 0, 1])
    match kind.split(":")[1]:
        case "existence" | "forbidden_words":
            words = given.get("keywords") or given["forbidden_words"]
            return f"{answer} {' '.join(words[: len(words) + min(near, 0)])}" if draw.random() < 0.7 else answer
        case "frequency":
            return f"{answer} {' '.join([given['keyword'].title()] * max(0, given['frequency'] + near))}"
        case "letter_frequency":
            return answer.replace(given["letter"], "") + given["letter"].upper() * max(0, given["let_frequency"] + near)
        case "response_language":
            return draw.choice([answer, *OTHER_LANGUAGES])
        case "number_sentences":
            return " ".join(answer.split()[: draw.randint(5, 40 + 15 * given["num_sentences"])])
        case "number_words":
            return " ".join((answer.split() * 50)[: max(1, given["num_words"] + draw.randint(-20, 20))])
        case "number_paragraphs":
            return "\n\n***\n\n".join([answer] * max(1, given["num_paragraphs"] + near))
        case "nth_paragraph_first_word":
            first = draw.choice([given["first_word"], f'"{given["first_word"].title()}', f"{given['first_word']}'s"])
            return "\n\n".join([f"{first}, one two"] * max(1, given["num_paragraphs"] + near))
        case "number_placeholders":
            return answer + " [name]" * max(0, given["num_placeholders"] + near)
        case "postscript":
            marker = draw.choice(["P.S.", "P.P.S", "p. s.", "P. P. S.", "PS:", given["postscript_marker"]])
            return f"{answer}\n\n{marker} that is all"
        case "number_bullet_lists":
            mark = draw.choice(["* ", "- ", "*", "  - ", "** ", "+ ", "* **Bold**: ", "*\n"])
            return f"Points\n{answer}\n" + f"{mark}point\n" * max(0, given["num_bullets"] + near)
        case "number_highlighted_sections":
            passage = draw.choice(["*one* ", "**two** ", "***three*** ", "* **four**: ", "** ** ", "_five_ ", "*\n* "])
            return answer + "\n" + passage * max(0, given["num_highlights"] + near)
        case "multiple_sections":
            form = draw.choice(["{} {}\n", "{}{} ", "\n{}\n{}\n", "**{} {}**\n", "{}  {}"])
            count = range(max(0, given["num_sections"] + near))
            return "".join(form.format(given["section_spliter"], number) + answer[:50] for number in count)
        case "json_format":
            text = json.dumps({"answer": answer})
            return draw.choice([text, f"```json\n{text}\n```", f"```\n{text}```", text[:-1], f"Here: {text}"])
        case "title":
            title = draw.choice(["<<A title>>", "<A title>", "<<>>", "<< >>", "<<A\ntitle>>", "<<<A>>>"])
            return f"{title}\n{answer}"
        case "two_responses":
            return draw.choice(["******", "\n******\n", "*****", "***"]).join(
                draw.choices([answer, answer[::-1], ""], k=draw.randint(2, 3))
            )
        case "repeat_prompt":
            return draw.choice(["", " ", "Sure: "]) + given["prompt_to_repeat"].swapcase() + "\n" + answer
        case "end_checker":
            return f"{answer} {given['end_phrase']}{draw.choice(['', ' ', '.', chr(34)])}"
        case "quotation":
            return draw.choice(['"{}"', ' "{}"\n', '"{}', "“{}”"]).replace("{}", answer)
        case "capital_word_frequency":
            words = ["NASA", "I'm", "A.M.", "DON'T", "STATE-OF-THE-ART", "AND/OR", "C3PO,", "(OK)", "**YES**", "R&D"]
            return (
                f"{answer} {' '.join(draw.choices(words, k=max(0, given['capital_frequency'] + draw.randint(-4, 2))))}"
            )
        case "english_capital":
            return answer.upper() + draw.choice(["", "", "x"])
        case "english_lowercase":
            return answer.lower() + draw.choice(["", "", "X"])
        case "no_comma":
            return answer.replace(",", "") if near else answer
        case "constrained_response":
            return draw.choice(["My answer is yes.", "Well. My answer is maybe. So.", "My answer is no", answer])
    raise AssertionError(kind)


def answers_to(row: dict[str, Any], texts: list[str], draw: random.Random) -> list[str]:
    answers = []
    for _ in range(NUM_ANSWERS):
        answer = draw.choice(texts)
        pairs = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
        for kind, given in draw.sample(pairs, len(pairs)):
            if draw.random() < 0.8:
                answer = changed(answer, kind, given, draw)
        if draw.random() < 0.3:
            answer = f"Sure, here it is:\n{answer}\nI hope that this helps"  # which the loose measures remove
        answers.append(answer)
    return answers


def explained(item: Item, answer: str) -> bool:
    """Whether a difference between the scripts is one that docs/evaluate.md lists."""
    check = item.data["checks"][item.data["number"] - 1]
    return (
        check.kind in BY_NLTK
        or check.arguments.get("letter") in ("!", "#")
        or (check.kind == "length_constraints:nth_paragraph_first_word" and "\n\n\n" in answer)
        or (check.kind == "language:response_language" and not all(map(detected_language, variants(answer))))
    )


def test_verdicts_are_those_of_the_published_script(monkeypatch: pytest.MonkeyPatch) -> None:
    import langdetect
    from lm_eval.tasks.ifeval import utils

    # A seed for both, since the published script's verdicts on short texts change between calls.
    monkeypatch.setattr(langdetect.DetectorFactory, "seed", 0)
    draw, texts = random.Random(0), [text for text in replies() if text.strip()]
    with gzip.open(SOURCE, "rt") as file:
        rows = {str(row["key"]): row for row in map(json.loads, file)}
    items = SUITE.read(str(SOURCE))
    all_answers = {key: answers_to(row, texts, draw) for key, row in rows.items()}
    seen: Counter[tuple[str, bool]] = Counter()
    agreed: Counter[str] = Counter()
    unexplained: list[tuple[str, str, bool, str]] = []
    for number in range(NUM_ANSWERS):
        model = Written(by_prompt({rows[key]["prompt"]: answers[number] for key, answers in all_answers.items()}))
        scored = SUITE.score(model, items, Tools())
        theirs = {key: utils.process_results(row, [all_answers[key][number]]) for key, row in rows.items()}
        for item, ours in zip(items, scored, strict=True):
            for measure, name in (("instruction_strict", "strict"), ("instruction_loose", "loose")):
                verdict = theirs[item.cluster][f"inst_level_{name}_acc"][item.data["number"] - 1]
                seen[item.group, verdict] += 1
                agreed[item.group] += ours.values[measure] == verdict
                if ours.values[measure] != verdict and not explained(item, ours.answer):
                    unexplained.append((item.item_id, measure, verdict, ours.answer))
    kinds = {item.group for item in items}
    shares = {kind: agreed[kind] / (seen[kind, True] + seen[kind, False]) for kind in sorted(kinds)}
    assert unexplained == []
    assert min(seen[kind, verdict] for kind in kinds for verdict in (True, False)) >= 5
    assert min(shares[kind] for kind in BY_NLTK) > 0.95
    # The whole prompt's values, from the same verdicts.
    first = [one for item, one in zip(items, scored, strict=True) if item.data["number"] == 1]
    for key, one in zip(rows, first, strict=True):
        for name in ("strict", "loose"):
            verdicts = [values.values[f"instruction_{name}"] for values in _of(items, scored, key)]
            assert one.values[f"prompt_{name}"] == float(all(verdicts))


def test_sentences_and_capital_words_of_replies_are_counted_as_by_nltk() -> None:
    from lm_eval.tasks.ifeval.instructions_util import count_sentences as published_count

    texts = [text for text in replies() if text.strip()]
    sentences = [count_sentences(text) - published_count(text) for text in texts]
    capitals = [
        sum(map(str.isupper, WORD_SEPARATORS.split(text))) - sum(map(str.isupper, nltk.word_tokenize(text)))
        for text in texts
    ]
    assert sentences.count(0) / len(texts) > 0.96
    assert capitals.count(0) / len(texts) > 0.99


def _of(items: list[Item], scored: list[Scored], key: str) -> list[Scored]:
    return [one for item, one in zip(items, scored, strict=True) if item.cluster == key]
