"""Encodes texts with a published tokenizer's own library. Runs in a process of its own, where that library is found.

Reads JSON on standard input: the kind, the file, texts, and conversations as lists of parts, where [text] is a special
token. Writes tokens, merges' order or scores, and numbers of tokens.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any


def byte_names() -> dict[int, str]:
    """GPT-2's character for each byte, in which byte-level vocabularies are written."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that make a token, in the order of the tokens that they make."""
    found = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        found += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def with_tiktoken(job: dict[str, Any]) -> dict[str, Any]:
    import tiktoken  # type: ignore[import-not-found]

    path, pattern, shift = Path(job["file"]), job.get("pattern"), 0
    if path.suffix == ".json":
        values = json.loads(path.read_text(encoding="utf-8"))
        pattern, shift = values["config"]["pattern"], values["config"]["default_num_special_tokens"]
        size = values["config"]["default_vocab_size"] - shift
        ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in values["vocab"][:size]}
    else:
        rows = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
    encoding = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    special = {name: number + (0 if shift else len(ranks)) for number, name in enumerate(job["special"])}

    def plain(text: str) -> list[int]:
        return [number + shift for number in encoding.encode(text, disallowed_special=())]

    names = byte_names()
    spelled = {token: "".join(names[byte] for byte in token) for token in ranks}
    tokens = [f"<filler {number}>" for number in range(shift)] + [spelled[token] for token in ranks]
    for name, number in special.items():
        tokens[number : number + 1] = [name]
    return {
        "tokens": tokens,
        "merges": [f"{spelled[left]} {spelled[right]}" for left, right in merges_of(ranks)],
        "texts": [plain(text) for text in job["texts"]],
        "conversations": [
            [n for part in parts for n in ([special[part[0]]] if isinstance(part, list) else plain(part))]
            for parts in job["conversations"]
        ],
    }


def with_sentencepiece(job: dict[str, Any]) -> dict[str, Any]:
    import sentencepiece  # type: ignore[import-not-found]

    model = sentencepiece.SentencePieceProcessor(model_file=job["file"])
    numbers = range(model.get_piece_size())
    kinds = [2 if model.IsUnknown(n) else 3 if model.IsControl(n) else 6 if model.IsByte(n) else 1 for n in numbers]
    return {
        "tokens": [model.id_to_piece(number) for number in numbers],
        "scores": [model.get_score(number) for number in numbers],
        "kinds": kinds,
        "texts": model.encode(job["texts"]),
        "conversations": [
            [
                n
                for part in parts
                for n in ([model.piece_to_id(part[0])] if isinstance(part, list) else model.encode(part))
            ]
            for parts in job["conversations"]
        ],
    }


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump((with_sentencepiece if given["kind"] == "sentencepiece" else with_tiktoken)(given), sys.stdout)
