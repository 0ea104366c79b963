"""What a run of the fuzzer counts, and the inputs that it found something with."""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input of one surface; what it is sent to (a call, a kind of file), and its bytes."""

    surface: str
    to: str
    parts: Sequence[bytes]

    def to_json(self) -> str:
        parts = [base64.b64encode(part).decode() for part in self.parts]
        return json.dumps({"surface": self.surface, "to": self.to, "parts": parts}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Input":
        found = json.loads(text)
        parts = [base64.b64decode(part) for part in found["parts"]]
        return cls(surface=found["surface"], to=found["to"], parts=parts)


@dataclass
class Findings:
    """Of one run."""

    num_inputs: Counter[str] = field(default_factory=Counter)
    """By surface."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """By what was answered."""
    unhandled: list[tuple[Input | None, str]] = field(default_factory=list)
    """What nothing had foreseen, with the input if it is known."""

    def note(self, sent: Input, outcome: str) -> None:
        self.num_inputs[sent.surface] += 1
        self.outcomes[f"{sent.surface}: {outcome}"] += 1

    def found(self, sent: Input | None, what: str) -> None:
        self.unhandled.append((sent, what))

    def keep(self, directory: Path) -> None:
        """Write what was found with a known input, to be replayed."""
        for sent, what in self.unhandled:
            if sent is None:
                continue
            text = sent.to_json()
            name = hashlib.sha256(text.encode()).hexdigest()[:12]
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{sent.surface}-{name}.json").write_text(text)
            print(f"{sent.surface}-{name}: {what[:300]}")


def corpus(surface: str) -> Iterator[Input]:
    """What was found before."""
    for path in sorted(CORPUS.glob(f"{surface}-*.json")):
        yield Input.from_json(path.read_text())
